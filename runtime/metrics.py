"""Counters of the step loop. Nothing here can fail a step, and nothing is per token.

Accepted lengths count the bonus token (1 .. G + 1), before any cut at the output's end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Metrics:
    """Sums since the engine was loaded (or `reset`); times in seconds."""

    block_size: int
    steps: int = 0  # of any kind
    prefill_tokens: int = 0  # rows of prompt chunks
    prefill_seconds: float = 0.0  # of steps with chunks
    decode_steps: int = 0  # steps with decoding requests only
    decode_tokens: int = 0  # tokens that decode steps committed
    decode_seconds: float = 0.0
    draft_steps: int = 0
    draft_seconds: float = 0.0  # in the draft graph
    verify_seconds: float = 0.0  # in the verify graph, of decode steps
    requests_steps: int = 0  # verification steps summed over requests
    drafted: int = 0
    verified: int = 0  # K summed
    # [G] how often position k was verified, and accepted with all before it
    verified_by_position: np.ndarray = field(init=False)
    accepted_by_position: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.verified_by_position = np.zeros(self.block_size, np.int64)
        self.accepted_by_position = np.zeros(self.block_size, np.int64)

    def reset(self) -> None:
        self.__init__(self.block_size)  # type: ignore[misc]

    def count_verification(self, lengths: np.ndarray, n_out: np.ndarray, *, drafted: bool) -> None:
        """One step's decoding requests: lengths [B] verified, n_out [B] tokens gained."""
        self.requests_steps += len(lengths)
        self.decode_tokens += int(n_out.sum())
        if drafted:
            self.drafted += len(lengths) * self.block_size
            self.verified += int(lengths.sum())
            k = np.arange(1, self.block_size + 1)
            self.verified_by_position += (lengths[:, None] >= k).sum(axis=0)
            self.accepted_by_position += (n_out[:, None] - 1 >= k).sum(axis=0)

    @property
    def host_seconds(self) -> float:
        """Decode time spent outside both graphs."""
        return self.decode_seconds - self.draft_seconds - self.verify_seconds

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per request and verification step, bonus token counted."""
        return self.decode_tokens / self.requests_steps if self.requests_steps else 0.0
