"""Opening checkpoints: which format a path holds, and the checks every format goes through.

`open_target` and `open_drafter` verify the config and the names and shapes of all tensors before
any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dspark_trt.build.config import TargetDims
from dspark_trt.build.drafter_checkpoint import open_deepspec, share_with_target
from dspark_trt.build.gguf_model import open_gguf
from dspark_trt.build.huggingface import open_huggingface
from dspark_trt.build.json_file import read_object
from dspark_trt.build.source import (
    CheckpointError,
    DrafterCheckpoint,
    TargetCheckpoint,
    TokenizerFiles,
    WeightSource,
)
from dspark_trt.build.tensor_names import check_target_weights
from dspark_trt.build.trtllm_checkpoint import open_trtllm

__all__ = [
    "CheckpointError",
    "DrafterCheckpoint",
    "TargetCheckpoint",
    "TokenizerFiles",
    "WeightSource",
    "check_target_weights",
    "open_drafter",
    "open_target",
    "share_with_target",
]

EXPECTED = (
    "a Hugging Face folder (config.json, *.safetensors, tokenizer.json), a GGUF file, or a "
    "TensorRT-LLM checkpoint folder (config.json with `architecture`, rank0.safetensors)"
)


def open_target(path: Path, tokenizer: Path | None = None) -> TargetCheckpoint:
    """Open a target of any supported format; `tokenizer` is a folder to take the tokenizer from."""
    path = Path(path)
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise CheckpointError(f"{tokenizer} is not a folder: give one that holds tokenizer.json")
    ckpt = _reader(path)(path, None if tokenizer is None else Path(tokenizer))
    check_target_weights(ckpt)
    return ckpt


def _reader(path: Path) -> Callable[[Path, Path | None], TargetCheckpoint]:
    """The function that opens what lies at `path`."""
    if path.is_file():
        if _magic(path) == b"GGUF":
            return open_gguf
        if path.suffix == ".gguf":
            raise CheckpointError(f"{path} does not start with GGUF: the file is damaged")
        raise CheckpointError(f"{path} is not a GGUF file; expected {EXPECTED}")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected {EXPECTED}")
    if not (path / "config.json").is_file():
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; give the file itself: {path / inside[0]}" if inside else ""
        raise CheckpointError(f"{path} has no config.json{hint}; expected {EXPECTED}")
    config = read_object(path / "config.json")
    if "architecture" in config and "architectures" not in config:
        return open_trtllm
    return open_huggingface


def _magic(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def open_drafter(path: Path, target: TargetDims) -> DrafterCheckpoint:
    """Open a DSpark drafter (DeepSpec's format, or our compact int8 one) made for `target`."""
    path = Path(path)
    if not (path / "config.json").is_file():
        fault = "has no config.json" if path.is_dir() else "is no folder"
        raise CheckpointError(
            f"{path} {fault if path.exists() else 'does not exist'}; expected a DSpark drafter's "
            "folder in DeepSpec's format (config.json and model.safetensors)"
        )
    return open_deepspec(path, target)
