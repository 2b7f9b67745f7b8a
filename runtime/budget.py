"""How much is verified: policies, as pure functions of data.

A step asks its policy twice.
1. `budget`, before anything is drafted: K, how many drafts the step verifies in all. 0 = do not
   draft. It sees the batch and what is at least two steps old, never this step's confidences.
2. The allocation. The K pairs (request, position) of largest survival are verified, ties by
   (position, request): PackVerify, on the device. A `synchronous` policy reads this step's
   confidences on the host instead and bounds each request's length itself, with `lengths`.

Neither ever sees a drafted token: whether position k is verified must not depend on x_k or on
anything after it, or the output's law is biased.

A policy is given copies, and what it answers is checked: a `PolicyError` names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol

import numpy as np


class PolicyError(ValueError):
    """A policy's parameter or answer is out of bounds, or the engine lacks what it needs."""


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
        _check_max_length(self.max_length)

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
        if isinstance(self.tau, bool) or not isinstance(self.tau, Real):
            raise PolicyError(f"threshold must be a number in [0, 1], got {self.tau!r}")
        if not 0.0 <= self.tau <= 1.0:  # false for NaN too
            raise PolicyError(
                f"threshold must be in [0, 1], got {self.tau}: 0 verifies every draft, 1 only "
                "those that are certain"
            )
        _check_max_length(self.max_length)

    def budget(self, view: BudgetView) -> int:
        return int(view.room.sum())

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        prefix = np.cumprod(conf >= self.tau, axis=1).sum(axis=1)
        return np.minimum(prefix, room).astype(np.int32)


def check_policy(policy: object, *, drafter: bool, confidence_head: bool) -> None:
    """Refuse what is no policy, and a synchronous one without confidences to read."""
    parts = ("name", "synchronous", "max_length", "budget", "lengths")
    if isinstance(policy, type) or not all(hasattr(policy, part) for part in parts):
        raise PolicyError(
            f"policy must be a policy object, got {policy!r}: give NoDraft(), Static() or "
            "Threshold(tau) of dspark_trt.runtime.budget, or an object with "
            f"{', '.join(parts)}"
        )
    _check_max_length(policy.max_length)  # type: ignore[attr-defined]
    if policy.synchronous and not (drafter and confidence_head):  # type: ignore[attr-defined]
        lacks = "its drafter has none" if drafter else "it has no drafter"
        raise PolicyError(
            f"the policy {policy.name!r} needs an engine with a confidence "  # type: ignore[attr-defined]
            f"head, {lacks}: use Static() or NoDraft()"
        )


def asked_budget(policy: Policy, view: BudgetView) -> int:
    """The policy's K as an int; the caller bounds it."""
    budget: object = policy.budget(view)
    if isinstance(budget, bool) or not isinstance(budget, Integral):
        raise PolicyError(
            f"the budget of policy {policy.name!r} must be an integer in [0, sum(room)], got "
            f"{budget!r}"
        )
    return int(budget)


def asked_lengths(policy: Policy, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The policy's lengths [B] int32, brought into [0, room]."""
    lengths = np.asarray(policy.lengths(conf, room.copy()))
    if lengths.shape != room.shape or not np.issubdtype(lengths.dtype, np.integer):
        raise PolicyError(
            f"the lengths of policy {policy.name!r} must be {len(room)} integers, one per "
            f"request, got shape {list(lengths.shape)} of {lengths.dtype}"
        )
    return np.clip(lengths, 0, room).astype(np.int32)


def _check_max_length(value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise PolicyError(
            f"max_length must be an integer >= 1 or None, got {value!r}: use the policy `none` to "
            "decode without drafts"
        )
