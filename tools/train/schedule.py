"""The learning rate: linear warm-up, then a cosine to zero, over steps or over the clock."""

from __future__ import annotations

import math

CLOCK_WARMUP = 100  # steps of warm-up at least where the clock rules: compiling takes its time too


def learning_rate(
    peak: float, progress: float, *, warmup: float, step: int, by_clock: bool
) -> float:
    """The rate at `progress` in [0, 1] of the run, before step `step` (from 0)."""
    rise = min(1.0, (progress / warmup) if warmup else 1.0)
    if by_clock:
        rise = min(1.0, (step + 1) / CLOCK_WARMUP)
    past = min(1.0, max(0.0, progress - warmup) / (1 - warmup))
    return peak * rise * 0.5 * (1 + math.cos(math.pi * past))
