"""`build_engine`: what is refused before work, what stands there afterwards."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from checkpoint_edits import copied, edit_json, edit_tensors
from factories import tiny_drafter, tiny_target

from dspark_trt.build import builder, weights
from dspark_trt.build.builder import BuildOptions, build_engine
from dspark_trt.build.checkpoint import CheckpointError
from dspark_trt.build.config import ConfigError
from dspark_trt.plugins.graph import DOMAIN
from dspark_trt.runtime.engine_dir import open_engine_dir

OPERATORS = {
    "PackVerify", "PagedKvWrite", "RaggedPagedAttention", "RaggedVerify", "Commit",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "tensorflow"}, "--backend must be one of"),
        ({"dtype": "float8"}, "--dtype must be one of"),
        ({"quantize": "int3"}, "--quantize must be one of none, int8, int4, got 'int3'"),
        ({"max_batch_size": 0}, "--max-batch-size must be >= 1, got 0"),
        ({"max_seq_len": 1}, "--max-seq-len must be >= 2, got 1"),
        ({"page_size": 4096}, "--page-size must be <= 1024, got 4096"),
        ({"max_seq_len": 513}, "--max-seq-len must be <= 512"),
        ({"max_seq_len": 64, "max_input_len": 64}, "--max-input-len must be < --max-seq-len (64)"),
    ],
)
def test_bad_options_name_flag_value_and_bound(
    target: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_engine(BuildOptions(model=target, output=tmp_path / "e", **options))
    assert words in str(caught.value)
    assert not (tmp_path / "e").exists()


def test_graphs_hold_our_operators_as_functions(
    target: Path, drafter: Path, tmp_path: Path
) -> None:
    build_engine(BuildOptions(model=target, drafter=drafter, output=tmp_path / "e"))
    model = onnx.load(tmp_path / "e" / "target.onnx", load_external_data=False)
    assert {f.name for f in model.functions} == OPERATORS
    assert {f.domain for f in model.functions} == {DOMAIN}
    draft = onnx.load(tmp_path / "e" / "draft.onnx", load_external_data=False)
    assert {f.name for f in draft.functions} == {"RaggedPagedAttention", "SequentialHead"}
    # The draft graph depends on the slots and the state alone; its own K/V never leave it.
    assert [o.name for o in draft.graph.output] == ["draft_tokens", "draft_logits", "conf_logits"]
    written = [o.name for o in model.graph.output if o.name.startswith("draft_kv.")]
    assert len(written) == 2 * 2


def test_shared_weights_are_stored_once(target: Path, drafter: Path, tmp_path: Path) -> None:
    build_engine(BuildOptions(model=target, drafter=drafter, output=tmp_path / "e"))

    def places(graph: str) -> dict[str, str]:
        model = onnx.load(tmp_path / "e" / graph, load_external_data=False)
        return {
            t.name: next(e.value for e in t.external_data if e.key == "offset")
            for t in model.graph.initializer
        }

    verify, draft = places("target.onnx"), places("draft.onnx")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert verify[name] == draft[name]


def test_manifest_says_what_was_built(target: Path, drafter: Path, tmp_path: Path) -> None:
    options = BuildOptions(
        model=target, drafter=drafter, output=tmp_path / "e", max_seq_len=64, page_size=16
    )
    returned = build_engine(options)
    manifest = open_engine_dir(tmp_path / "e").manifest
    assert manifest == returned
    assert manifest.limits.max_seq_len == 64
    assert manifest.limits.max_input_len == 63
    assert manifest.drafter is not None
    assert manifest.drafter["block_size"] == 4
    assert manifest.checkpoint.name == target.name
    assert "/" not in json.dumps(dataclasses.asdict(manifest.checkpoint))
    assert set(manifest.files) >= {"target.onnx", "draft.onnx", "weights.bin"}


def test_equal_builds_have_equal_hashes(target: Path, tmp_path: Path) -> None:
    first = build_engine(BuildOptions(model=target, output=tmp_path / "a"))
    second = build_engine(BuildOptions(model=target, output=tmp_path / "b"))
    assert first.engine_hash == second.engine_hash
    other = build_engine(BuildOptions(model=target, output=tmp_path / "c", page_size=16))
    assert other.engine_hash != first.engine_hash


def test_a_build_that_fails_leaves_the_old_engine(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "e"
    before = build_engine(BuildOptions(model=target, output=output))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(builder, "write_graphs", full)
    with pytest.raises(ValueError, match="No space left"):
        build_engine(BuildOptions(model=target, output=output, page_size=16))
    assert open_engine_dir(output).manifest == before
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_a_damaged_checkpoint_is_refused_before_an_engine_is_begun(
    target: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    for file in target.iterdir():
        (tmp_path / "broken" / file.name).write_bytes(file.read_bytes())
    weights = next((tmp_path / "broken").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        build_engine(BuildOptions(model=tmp_path / "broken", output=tmp_path / "e"))
    assert not (tmp_path / "e").exists()


def test_progress_ends_with_everything_read(target: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    build_engine(
        BuildOptions(model=target, output=tmp_path / "e"),
        lambda done, total, name: calls.append((done, total)),
    )
    assert calls[-1][0] == calls[-1][1]
    assert all(a[0] <= b[0] for a, b in zip(calls, calls[1:], strict=False))


LIMITED = """
import resource, sys
from pathlib import Path
from dspark_trt.build.builder import BuildOptions, build_engine
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    build_engine(BuildOptions(model=Path(sys.argv[1]), output=Path(sys.argv[2])))
except ValueError as error:
    print(type(error).__name__, error)
"""


def test_a_limit_on_file_sizes_is_told_as_such(target: Path, tmp_path: Path) -> None:
    """The weights are larger than the process may write: EFBIG, like ENOSPC, keeps its number."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, target, tmp_path / "e"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "EngineDirError writing the engine" in done.stdout
    assert "File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def huge(folder: Path, tmp_path: Path) -> Path:
    """The target with weights so large, yet finite, that its logits are not."""
    model = copied(folder, tmp_path)

    def enlarge(tensors: dict[str, Any]) -> None:
        for name in ("model.norm.weight", "lm_head.weight"):
            tensors[name].fill_(3e38)

    edit_tensors(model / "model.safetensors", enlarge)
    return model


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_model_without_finite_logits_gives_no_engine(
    target: Path, tmp_path: Path, quantize: str
) -> None:
    model = huge(target, tmp_path)
    with pytest.raises(CheckpointError, match="the model gives non-finite logits"):
        build_engine(BuildOptions(model=model, output=tmp_path / "e", quantize=quantize))
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]


def test_a_context_shorter_than_the_probe_builds(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "llama")
    edit_json(target / "config.json", max_position_embeddings=4)
    assert build_engine(BuildOptions(model=target, output=tmp_path / "e")).limits.max_seq_len == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"caf\xe9", "must be UTF-8 text, byte 3 is not"), (None, "cannot be read: No such file"),
     (b"", "has no text to measure on")],
)  # fmt: skip
def test_a_bad_text_is_refused_before_any_work(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    words: str,
) -> None:
    monkeypatch.setattr(builder, "write_engine_dir", None)  # not reached
    text = tmp_path / "text"
    if content is not None:
        text.write_bytes(content)
    options = BuildOptions(
        model=target, output=tmp_path / "e", quantize="int4", perplexity_text=text
    )
    with pytest.raises(ConfigError, match=f"--perplexity-text .*{words}"):
        build_engine(options)


@pytest.mark.parametrize("tie", [True, False])
def test_the_space_asked_for_is_near_what_is_taken(
    tmp_path: Path, tie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    real = builder.write_engine_dir

    def spy(output: Path, *, expected_bytes: int) -> Any:
        asked.append(expected_bytes)
        return real(output, expected_bytes=expected_bytes)

    monkeypatch.setattr(builder, "write_engine_dir", spy)
    monkeypatch.setattr(weights, "ALIGNMENT", 1)
    target = tiny_target(tmp_path, "llama", tie=tie)
    build_engine(BuildOptions(model=target, output=tmp_path / "e"))
    written = (tmp_path / "e" / "weights.bin").stat().st_size
    assert asked[0] == pytest.approx(written, rel=0.02)
