"""Outputs that would take something along when they are replaced are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import tiny_target

from dspark_trt.build.builder import BuildOptions, build_engine
from dspark_trt.build.paths import check_paths
from dspark_trt.runtime.engine_dir import EngineDirError


@pytest.mark.parametrize("flag", ["--model", "--drafter", "--tokenizer"])
@pytest.mark.parametrize(
    ("output", "relation"), [(".", "is inside"), ("in", "is"), ("in/engine", "holds")]
)
def test_an_output_apart_from_what_is_read(
    tmp_path: Path, flag: str, output: str, relation: str
) -> None:
    (tmp_path / "root").mkdir()
    where = tmp_path / "root" / "in"
    with pytest.raises(EngineDirError, match=rf"overlap \({flag} {relation} the output\)"):
        check_paths(tmp_path / "root" / output, {"--model": None, flag: where})
    check_paths(tmp_path / "root" / "inside", {flag: where})


def test_a_link_to_the_model_is_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    with pytest.raises(EngineDirError, match="overlap"):
        check_paths(tmp_path / "link", {"--model": tmp_path / "model"})


def test_the_builder_refuses_the_folder_of_its_model(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "llama")
    before = sorted(p.name for p in target.iterdir())
    with pytest.raises(EngineDirError, match=r"--model .* overlap"):
        build_engine(BuildOptions(model=target, output=target / "engine"))
    assert sorted(p.name for p in target.iterdir()) == before


def test_an_engine_with_files_of_others_stays(tmp_path: Path) -> None:
    target, output = tiny_target(tmp_path, "llama"), tmp_path / "e"
    options = BuildOptions(model=target, output=output)
    build_engine(options)
    for name in ("sts.json", "cost_table.json"):
        (output / name).write_text("{}")
    build_engine(options)  # these belong to an engine
    (output / "notes").mkdir()
    (output / "notes" / "thesis.txt").touch()
    with pytest.raises(EngineDirError, match=r"not the engine's: notes/thesis\.txt\. They would"):
        build_engine(options)
    assert (output / "notes" / "thesis.txt").exists()


def test_loops_of_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(EngineDirError, match="is a loop of symbolic links"):
        check_paths(tmp_path / "a", {})


def test_a_name_that_no_manifest_takes_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(EngineDirError, match="must hold no backslash: rename it"):
        check_paths(tmp_path / "e", {"--model": tmp_path / "a\\b"})
