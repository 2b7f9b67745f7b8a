"""How much is verified: policies, as pure functions of data.

A step asks its policy twice.
1. `budget`, before anything is drafted: K, how many drafts the step verifies in all. 0 = do not
   draft. It sees the batch and what is at least two steps old, never this step's confidences.
2. The allocation. The K pairs (request, position) of largest survival are verified, ties by
   (position, request): PackVerify, on the device. A `synchronous` policy reads this step's
   confidences on the host instead and bounds each request's length itself, with `lengths`.

Neither ever sees a drafted token: whether position k is verified must not depend on x_k or on
anything after it, or the output's law is biased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class PolicyError(ValueError):
    """A policy's parameter is out of bounds."""


@dataclass(frozen=True, slots=True)
class BudgetView:
    """What a budget may be made from."""

    # [B] drafts that each request has room for (block size, tokens still wanted, context left)
    room: np.ndarray
    # Confidence logits [B', G] of the latest draft that is at least two steps old, and the
    # temperatures [G] they are read with; None while there is none.
    lagged_conf_logits: np.ndarray | None = None
    sts: np.ndarray | None = None


class Policy(Protocol):
    """Decides how many drafts a step verifies."""

    @property
    def name(self) -> str: ...

    @property
    def synchronous(self) -> bool:
        """Whether `lengths` is asked, which makes a GPU wait for the host."""

    @property
    def max_length(self) -> int | None:
        """Longest prefix of a draft that is verified; None = the whole block."""

    def budget(self, view: BudgetView) -> int:
        """K in [0, sum(room)]; 0 = do not draft."""

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        """[B] int32 lengths from this step's conf [B, G] = c, at most `room` [B].

        Asked of synchronous policies alone. Whether position k is verified may depend on
        conf[r, 1 .. k] and on nothing later.
        """


@dataclass(frozen=True, slots=True)
class NoDraft:
    """Plain decoding: nothing is drafted."""

    name: str = "none"
    synchronous: bool = False
    max_length: int | None = None

    def budget(self, view: BudgetView) -> int:
        return 0

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        return np.zeros_like(room)


@dataclass(frozen=True, slots=True)
class Static:
    """Every request verifies its first `max_length` drafts (None = the whole block)."""

    max_length: int | None = None
    name: str = "static"
    synchronous: bool = False

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise PolicyError(
                f"max_length must be >= 1, got {self.max_length}: use the policy `none` to decode "
                "without drafts"
            )

    def budget(self, view: BudgetView) -> int:
        return int(view.room.sum())

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        return room


@dataclass(frozen=True, slots=True)
class Threshold:
    """Each request verifies its drafts up to the first with c_k < tau."""

    tau: float
    name: str = "threshold"
    synchronous: bool = True
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.tau <= 1.0:  # false for NaN too
            raise PolicyError(
                f"threshold must be in [0, 1], got {self.tau}: 0 verifies every draft, 1 only "
                "those that are certain"
            )

    def budget(self, view: BudgetView) -> int:
        return int(view.room.sum())

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        prefix = np.cumprod(conf >= self.tau, axis=1).sum(axis=1)
        return np.minimum(prefix, room).astype(np.int32)
