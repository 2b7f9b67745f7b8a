"""Which format a path holds, what is said where it is none, and what reading costs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_edits import copied, edit_json
from factories import tiny_target

from dspark_trt.build.checkpoint import CheckpointError, open_drafter, open_target
from dspark_trt.build.config import ConfigError
from dspark_trt.build.source import check_finite, hash_files, naming
from dspark_trt.build.tensor_names import equal_tensors, target_shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("c"), "qwen3")


def test_paths_that_hold_nothing_say_what_was_expected(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; expected a Hugging Face folder"):
        open_target(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json; expected a Hugging Face folder"):
        open_target(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUX")
    with pytest.raises(CheckpointError, match="give the file itself: .*model.gguf"):
        open_target(tmp_path)
    with pytest.raises(CheckpointError, match="does not start with GGUF"):
        open_target(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is not a GGUF file; expected"):
        open_target(folder / "config.json")


def test_strings_are_paths_too(folder: Path) -> None:
    assert open_target(str(folder)).dims == open_target(folder).dims  # type: ignore[arg-type]


def test_a_target_is_no_drafter(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'Qwen3ForCausalLM' is not supported.*Qwen3DSparkModel"):
        open_drafter(folder, open_target(folder).dims)


def test_a_drafter_that_is_not_there_is_told_from_one_without_config(
    folder: Path, tmp_path: Path
) -> None:
    dims = open_target(folder).dims
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, r"has no config\.json"),
        (folder / "config.json", "is no folder"),
    ):
        with pytest.raises(CheckpointError, match=f"{path} {words}; expected a DSpark drafter"):
            open_drafter(path, dims)


def test_tokenizer_folder_of_a_hugging_face_target(folder: Path, tmp_path: Path) -> None:
    copy = copied(folder, tmp_path)
    edit_json(copy / "tokenizer_config.json", eos_token="<|user|>", chat_template="other")
    ckpt = open_target(folder, copy)
    assert ckpt.tokenizer.config["chat_template"] == "other"
    assert ckpt.dims.eos_token_ids == (1, 2)


def test_shapes_cover_the_whole_model(folder: Path) -> None:
    ckpt = open_target(folder)
    shapes = target_shapes(ckpt.dims)
    assert shapes == {name: ckpt.weights.shape(name) for name in ckpt.weights.names()}


def test_opening_and_reading_stay_small(tmp_path: Path) -> None:
    """Python allocations: little to open, one tensor at a time to read."""
    big = tiny_target(tmp_path, "llama", hidden=256, vocab=1024, layers=3, dtype="bfloat16")
    ckpt = open_target(big)
    largest = max(int(np.prod(ckpt.weights.shape(n))) * 4 for n in ckpt.weights.names())
    tracemalloc.start()
    open_target(big)
    opened = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for name in ckpt.weights.names():
        ckpt.weights.tensor(name)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert opened < 4 << 20
    assert peak < 1.6 * largest


def test_equal_tensors_compares_values(folder: Path) -> None:
    weights = open_target(folder).weights
    a, b = "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"
    assert equal_tensors(weights, a, weights, a)
    assert not equal_tensors(weights, a, weights, b)
    assert not equal_tensors(weights, a, weights, "norm.weight")


def test_check_finite_names_the_first_bad_value(tmp_path: Path) -> None:
    values = np.full((3, 4), np.float32(3e38))
    check_finite(tmp_path, "w", values)  # a float32 sum would overflow
    values[1, 2], values[2, 0] = np.inf, -np.inf
    with pytest.raises(CheckpointError, match=r"tensor w has 2 values .*first at \[1, 2\] \(inf\)"):
        check_finite(tmp_path, "w", values)


def test_messages_cannot_reach_the_terminal() -> None:
    assert str(CheckpointError("tensor a\x1b[2J\n is unknown")) == "tensor a\\x1b[2J\\n is unknown"
    assert str(CheckpointError("Żółć 東京")) == "Żółć 東京"
    assert len(str(CheckpointError("x" * 10_000_000))) < 2100


def test_hash_depends_on_names_sizes_and_contents(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"12")
    b.write_bytes(b"3")
    first = hash_files([a, b])
    assert hash_files([b, a]) == first
    a.write_bytes(b"1")
    b.write_bytes(b"23")
    assert hash_files([a, b]) != first


def test_naming_puts_the_file_before_the_message_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for message in ("x must be 1", f"{path}: x must be 1"):
        with pytest.raises(ConfigError) as caught, naming(path):
            raise ConfigError(message)
        assert str(caught.value) == f"{path}: x must be 1"
