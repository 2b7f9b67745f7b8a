"""stub"""

from __future__ import annotations

from pathlib import Path

from dspark_trt.build.source import CheckpointError, TargetCheckpoint


def open_trtllm(folder: Path, tokenizer_folder: Path | None = None) -> TargetCheckpoint:
    """Not there yet."""
    raise CheckpointError(f"{folder}: TensorRT-LLM checkpoints are not read yet")
