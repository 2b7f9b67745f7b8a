"""stub"""

from __future__ import annotations

from pathlib import Path

from dspark_trt.build.config import TargetDims
from dspark_trt.build.source import CheckpointError, DrafterCheckpoint


def open_deepspec(folder: Path, target: TargetDims) -> DrafterCheckpoint:
    """Not there yet."""
    raise CheckpointError(f"{folder}: drafters are not read yet")
