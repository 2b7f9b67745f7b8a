"""The engine directory: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dspark_trt.runtime import engine_dir
from dspark_trt.runtime.engine_dir import (
    CheckpointInfo,
    EngineDirError,
    Gpu,
    Limits,
    Manifest,
    check_output,
    check_relative,
    open_engine_dir,
    read_manifest,
    write_engine_dir,
)
from dspark_trt.runtime.file_hash import FileEntry

DIMS = {"num_layers": 2, "vocab_size": 50, "layer": {"num_kv_heads": 1, "head_dim": 8}}
DRAFTER = {**DIMS, "block_size": 4}


def manifest(**changes: object) -> Manifest:
    """A small manifest; dims as `dataclasses.asdict` leaves them, with tuples inside."""
    base = Manifest(
        dspark_version="0.1.0",
        versions={"python": "3.11.7", "onnxruntime": "1.20.0"},
        created="2026-01-02T03:04:05Z",
        backend="onnxruntime",
        dtype="float32",
        quantize="none",
        checkpoint=CheckpointInfo("model.gguf", "gguf", "ab" * 32, "Q4_1"),
        target={**DIMS, "family": "llama", "sliding_windows": (0, 0), "eos_token_ids": (2,)},
        limits=Limits(max_batch_size=8, max_input_len=64, max_seq_len=128, max_num_tokens=64),
        page_size=32,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def write(output: Path, weights: bytes = b"weights", *, lacks: str = "", **changes: object) -> None:
    with write_engine_dir(output) as staged:
        (staged.path / "target.onnx").write_bytes(b"graph")
        for name, data in (
            ("weights.bin", weights),
            ("tokenizer/tokenizer.json", b"{}"),
            ("tokenizer/tokenizer_config.json", b"{}"),
        ):
            if name != lacks:
                with staged.create(name) as file:
                    file.write(data)
        staged.describe(manifest(**changes))


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write(tmp_path / "engine")
    return tmp_path / "engine"


def rewrite(engine: Path, edit: Callable[[dict], None]) -> None:
    """Edit the manifest of an engine in place."""
    path = engine / "manifest.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_what_is_written_is_read(engine: Path) -> None:
    opened = open_engine_dir(engine)
    assert opened.file("weights.bin").read_bytes() == b"weights"
    assert opened.manifest.target["sliding_windows"] == [0, 0]
    entry = opened.manifest.files["target.onnx"]
    assert entry == FileEntry(5, hashlib.sha256(b"graph").hexdigest())
    with pytest.raises(EngineDirError, match="has no file 'draft.onnx'"):
        opened.file("draft.onnx")
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


@pytest.mark.parametrize(
    "name", ["weights.bin", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
)
def test_a_file_that_is_loaded_must_be_listed(tmp_path: Path, name: str) -> None:
    write(tmp_path / "engine", lacks=name)
    (tmp_path / "engine" / name).write_bytes(b"slipped in later")
    for verify in ("size", "hash"):
        with pytest.raises(EngineDirError, match=f"does not list {name}, which would be loaded"):
            open_engine_dir(tmp_path / "engine", verify=verify)  # type: ignore[arg-type]


def test_a_drafter_s_graph_must_be_listed(tmp_path: Path) -> None:
    write(tmp_path / "engine", drafter=DRAFTER)
    with pytest.raises(EngineDirError, match=r"does not list draft\.onnx"):
        open_engine_dir(tmp_path / "engine")


def test_a_folder_that_is_a_link_is_refused(engine: Path) -> None:
    (engine / "tokenizer").rename(engine.parent / "outside")
    (engine / "tokenizer").symlink_to(engine.parent / "outside")
    with pytest.raises(EngineDirError, match=r"lacks its file tokenizer/tokenizer\.json"):
        open_engine_dir(engine)


def test_a_mixture_is_never_seen_however_the_name_changes_hands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between manifest and files the directory is replaced twice; its inode may come back."""
    output = tmp_path / "engine"
    write(output, b"one")
    read, left = engine_dir._manifest_of, [3]

    def replaced_after_reading(held: engine_dir.HeldDirectory) -> Manifest:
        found = read(held)
        if left[0]:
            left[0] -= 1
            write(output, b"longer" * left[0])
            write(output, b"another")
        return found

    monkeypatch.setattr(engine_dir, "_manifest_of", replaced_after_reading)
    assert open_engine_dir(output).manifest.files["weights.bin"].bytes == len(b"another")


def test_arrays_are_hashed_as_they_are_written(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with write_engine_dir(tmp_path / "engine") as staged:
        with staged.create("w.bin") as file:
            assert file.write(array.data) == 48
            assert file.write(b"tail") == 4
            assert file.tell() == 52
        staged.describe(manifest(backend="tensorrt"))
    assert open_engine_dir(tmp_path / "engine").manifest.files["w.bin"].bytes == 52


def test_a_file_changed_after_it_was_hashed_is_hashed_again(tmp_path: Path) -> None:
    with write_engine_dir(tmp_path / "engine") as staged:
        with staged.create("w.bin") as file:
            file.write(b"one")
        (staged.path / "w.bin").write_bytes(b"longer")
        staged.describe(manifest(backend="tensorrt"))
    open_engine_dir(tmp_path / "engine")


def test_the_engine_hash_is_of_the_content_and_not_of_the_date(tmp_path: Path) -> None:
    hashes = []
    for name, weights, created in (("a", b"x", "1"), ("b", b"x", "2"), ("c", b"y", "1")):
        write(tmp_path / name, weights, created=created)
        hashes.append(read_manifest(tmp_path / name).engine_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def test_files_made_later_do_not_matter(engine: Path) -> None:
    (engine / "cost_table.json").write_text("{}")
    open_engine_dir(engine)


def test_a_changed_byte_is_found_by_hash_and_a_changed_size_always(engine: Path) -> None:
    (engine / "weights.bin").write_bytes(b"weighty")
    open_engine_dir(engine, verify="size")
    with pytest.raises(EngineDirError, match=r"weights\.bin has SHA-256 .* the file was changed"):
        open_engine_dir(engine)
    (engine / "weights.bin").write_bytes(b"weigh")
    for verify in ("size", "hash"):
        with pytest.raises(EngineDirError, match="has 5 bytes, manifest.json says 7"):
            open_engine_dir(engine, verify=verify)  # type: ignore[arg-type]
    (engine / "weights.bin").unlink()
    with pytest.raises(EngineDirError, match=r"lacks its file weights\.bin"):
        open_engine_dir(engine)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(schema_version=2), "schema version 2, this dspark reads 1"),
        (lambda m: m.pop("schema_version"), "schema version None, this dspark reads 1"),
        (lambda m: m.update(colour="red"), "unknown keys: colour"),
        (lambda m: m.pop("limits"), "lacks the keys: limits"),
        (
            lambda m: m["limits"].update(max_batch_size=0),
            r"max_batch_size .* \[1, 2147483647\], got 0",
        ),
        (lambda m: m.update(page_size="32"), "page_size must be int, got str '32'"),
        (lambda m: m["limits"].update(max_seq_len=2**31), r"max_seq_len must be in \[1, 21474"),
        (lambda m: m.update(page_size=0), r"page_size must be an integer in \[1, 1024\], got 0"),
        (lambda m: m.update(page_size=1025), r"page_size must be an integer in .* got 1025"),
        (lambda m: m["target"].pop("vocab_size"), r"target.vocab_size must be .* got None"),
        (lambda m: m["target"].update(vocab_size=True), r"target.vocab_size must be .* got True"),
        (lambda m: m["target"].update(eos_token_ids=[50]), r"eos_token_ids must .* 49\], got 50"),
        (lambda m: m["target"].update(eos_token_ids=3), r"must be a list of token ids, got 3"),
        (lambda m: m["target"].update(layer=[]), r"target.layer must be an object"),
        (lambda m: m["target"]["layer"].update(head_dim="8"), r"layer.head_dim must be .* '8'"),
        (lambda m: m.update(drafter={**DRAFTER, "block_size": 65}), r"block_size must .* got 65"),
        (lambda m: m.update(drafter=DIMS), r"drafter.block_size must be .* got None"),
        (lambda m: m.update(drafter={**DRAFTER, "vocab_size": 9}), r"the target's \(50\), got 9"),
        (lambda m: m["checkpoint"].update(name="/home/me/model"), "must be no path"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}}), "got '../x'"),
        (lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}), "/etc/passwd"),
    ],
)
def test_a_manifest_that_is_not_ours_is_refused(
    engine: Path, edit: Callable[[dict], None], words: str
) -> None:
    rewrite(engine, edit)
    with pytest.raises(EngineDirError, match=words):
        open_engine_dir(engine)


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/a", "a//b", "a\\b", "manifest.json"])
def test_a_file_name_stays_inside(name: str) -> None:
    with pytest.raises(EngineDirError, match="inside the engine directory"):
        check_relative(name)


def test_a_link_out_of_the_directory_is_refused(engine: Path) -> None:
    outside = engine.parent / "outside"
    outside.write_bytes(b"graph")
    (engine / "target.onnx").unlink()
    (engine / "target.onnx").symlink_to(outside)
    with pytest.raises(EngineDirError, match=r"lacks its file target\.onnx"):
        open_engine_dir(engine)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"a":' * 100_000, b" " * (5 << 20)])
def test_a_damaged_manifest_is_one_clear_error(engine: Path, data: bytes) -> None:
    (engine / "manifest.json").write_bytes(data)
    with pytest.raises(EngineDirError, match="build the engine again"):
        open_engine_dir(engine)


def test_what_is_no_engine_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(EngineDirError, match="is not a directory"):
        open_engine_dir(tmp_path / "absent")
    with pytest.raises(EngineDirError, match="holds no manifest.json"):
        open_engine_dir(tmp_path)


def test_an_output_that_is_not_an_engine_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("x")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "an app"}')
    for name, words in (("file", "is a file"), ("work", "is not empty"), ("web", "of ours")):
        with pytest.raises(EngineDirError, match=words):
            write(tmp_path / name)
    with pytest.raises(EngineDirError, match="mount point"):
        check_output(Path("/proc"))
    assert (tmp_path / "work" / "thesis.txt").exists()
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    write(tmp_path / "empty")
    open_engine_dir(tmp_path / "empty")


def test_an_engine_of_another_schema_may_be_replaced(engine: Path) -> None:
    rewrite(engine, lambda m: m.update(schema_version=99))
    write(engine)
    open_engine_dir(engine)


def test_a_link_to_an_engine_is_followed(engine: Path) -> None:
    link = engine.parent / "current"
    link.symlink_to(engine)
    write(link, b"newer")
    assert link.is_symlink()
    assert open_engine_dir(link).file("weights.bin").read_bytes() == b"newer"


@pytest.fixture
def small_file_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_file_limit")
def test_a_file_past_the_limit_leaves_the_old_engine(engine: Path) -> None:
    with pytest.raises(EngineDirError, match=r"stopped: File too large .* is unchanged"):
        write(engine, b"x" * (2 << 20))
    assert open_engine_dir(engine).manifest.files["weights.bin"].bytes == 7
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


def test_a_full_disk_leaves_the_old_engine(engine: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with (
        pytest.raises(EngineDirError, match="stopped: No space left on device"),
        write_engine_dir(engine) as staged,
    ):
        staged.describe(manifest())
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")
    open_engine_dir(engine)


def test_too_little_space_is_refused_before_the_work(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_dir, "_free", lambda target: 3_000_000)
    with (
        pytest.raises(EngineDirError, match="needs 5 MB beside what is there, 3 MB are free"),
        write_engine_dir(engine, expected_bytes=5_000_000),
    ):
        pytest.fail("the block must not run")


def test_other_libraries_and_gpus_are_refused_with_both_named() -> None:
    built = manifest(versions={"tensorrt": "10.6.0"}, gpu=Gpu("H200", "9.0"))
    built.require_version("tensorrt", "10.6.0")
    built.require_gpu(Gpu("H100", "9.0"))
    with pytest.raises(EngineDirError, match=r"tensorrt 10\.6\.0, this process has 11\.2"):
        built.require_version("tensorrt", "11.2")
    with pytest.raises(EngineDirError, match=r"H200 \(sm 9\.0\), this GPU is L4 \(sm 8\.9\)"):
        built.require_gpu(Gpu("L4", "8.9"))


def test_forgetting_to_describe_is_our_bug_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="describe"), write_engine_dir(tmp_path / "engine"):
        pass
    assert list(tmp_path.iterdir()) == []
