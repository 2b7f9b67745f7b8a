"""Engines of tiny models for the tests: a fraction of a second to build, to load and to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark_trt.build.builder import BuildOptions, build_engine

LIMITS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_seq_len": 128,
    "max_num_tokens": 64,
    "page_size": 8,
    "gather_context_logits": True,
    "gather_generation_logits": True,
}


def tiny_engine(folder: Path, target: Path, drafter: Path | None = None, **options: Any) -> Path:
    """Build an engine directory in the new folder `folder`; `options` are BuildOptions' fields."""
    settings = LIMITS | options
    build_engine(BuildOptions(model=target, drafter=drafter, output=folder, **settings))
    return folder
