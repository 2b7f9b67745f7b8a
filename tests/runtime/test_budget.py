"""Policies: pure functions of what they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dspark_trt.runtime.budget import (
    BudgetView,
    NoDraft,
    PolicyError,
    Static,
    Threshold,
    asked_budget,
    asked_lengths,
    check_policy,
)

ROOM = np.array([4, 0, 2], np.int32)
CONF = np.array([[0.9, 0.8, 0.3, 0.9], [1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]])


def test_no_draft_drafts_nothing() -> None:
    policy = NoDraft()
    assert policy.budget(BudgetView(ROOM)) == 0
    assert policy.lengths(CONF, ROOM).tolist() == [0, 0, 0]
    assert not policy.synchronous


def test_static_verifies_all_that_there_is_room_for() -> None:
    assert Static().budget(BudgetView(ROOM)) == 6
    assert Static().max_length is None
    assert Static(2).max_length == 2
    assert not Static().synchronous


@pytest.mark.parametrize("length", [0, -1])
def test_static_needs_a_length(length: int) -> None:
    with pytest.raises(PolicyError, match=f"max_length must be an integer .*got {length}"):
        Static(length)


@pytest.mark.parametrize(
    "tau, lengths",
    [(0.0, [4, 0, 2]), (0.5, [2, 0, 2]), (0.6, [2, 0, 0]), (0.85, [1, 0, 0]), (1.0, [0, 0, 0])],
)
def test_threshold_takes_the_prefix_of_confident_drafts(tau: float, lengths: list[int]) -> None:
    policy = Threshold(tau)
    assert policy.synchronous
    got = policy.lengths(CONF, ROOM)
    assert got.tolist() == lengths
    assert got.dtype == np.int32


def test_threshold_of_one_takes_what_is_certain() -> None:
    room = np.array([4], np.int32)
    assert Threshold(1.0).lengths(np.ones((1, 4)), room).tolist() == [4]


@pytest.mark.parametrize("tau", [-0.01, 1.01, float("nan"), float("inf")])
def test_threshold_outside_its_range(tau: float) -> None:
    with pytest.raises(PolicyError, match=r"threshold must be in \[0, 1\], got"):
        Threshold(tau)


def test_threshold_reads_nothing_after_the_position_it_judges() -> None:
    """Changing c_k' changes no decision on k < k'."""
    generator = np.random.default_rng(1)
    for _ in range(50):
        conf, room = generator.random((3, 5)), np.full(3, 5, np.int32)
        before = Threshold(0.5).lengths(conf, room)
        k = int(generator.integers(5))
        conf[:, k:] = generator.random((3, 5 - k))
        after = Threshold(0.5).lengths(conf, room)
        assert (np.minimum(before, k) == np.minimum(after, k)).all()


@pytest.mark.parametrize("length", [0, -3, 1.5, True, "2", float("nan")])
@pytest.mark.parametrize("make", [Static, lambda length: Threshold(0.5, max_length=length)])
def test_a_longest_length_is_a_whole_number(make: Any, length: Any) -> None:
    with pytest.raises(PolicyError, match="max_length must be an integer >= 1 or None, got"):
        make(length)


@pytest.mark.parametrize("tau", [True, "0.5", None])
def test_a_threshold_is_a_number(tau: Any) -> None:
    with pytest.raises(PolicyError, match=r"threshold must be a number in \[0, 1\], got"):
        Threshold(tau)


@dataclass
class Answering:
    """Gives the answers it was made with."""

    answer: Any
    name: str = "answering"
    synchronous: bool = True
    max_length: Any = None

    def budget(self, view: BudgetView) -> int:
        return self.answer  # type: ignore[no-any-return]

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("answer", [2.0, float("nan"), None, True, np.float32(3), "3"])
def test_a_budget_that_is_no_integer_is_refused(answer: Any) -> None:
    with pytest.raises(PolicyError, match="budget of policy 'answering' must be an integer"):
        asked_budget(Answering(answer), BudgetView(ROOM))
    assert asked_budget(Answering(np.int16(3)), BudgetView(ROOM)) == 3


@pytest.mark.parametrize(
    "answer", [3, [1, 2], [[1, 2, 3]], [1.0, 2.0, 3.0], [float("nan")] * 3, None, [True] * 3]
)
def test_lengths_of_a_wrong_kind_are_refused(answer: Any) -> None:
    with pytest.raises(PolicyError, match="lengths of policy 'answering' must be 3 integers"):
        asked_lengths(Answering(answer), CONF, ROOM)
    assert asked_lengths(Answering([9, 9, -1]), CONF, ROOM).tolist() == [4, 0, 0]


@pytest.mark.parametrize("policy", ["static", Static, 0, False, object()])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(PolicyError, match="policy must be a policy object, got .*Static()"):
        check_policy(policy, drafter=True, confidence_head=True)


def test_a_synchronous_policy_needs_confidences() -> None:
    for policy in (Threshold(0.5), Answering(1)):
        check_policy(policy, drafter=True, confidence_head=True)
        with pytest.raises(PolicyError, match="confidence head, its drafter has none: use Static"):
            check_policy(policy, drafter=True, confidence_head=False)
        with pytest.raises(PolicyError, match="confidence head, it has no drafter: use Static"):
            check_policy(policy, drafter=False, confidence_head=False)
    check_policy(Static(), drafter=False, confidence_head=False)
    with pytest.raises(PolicyError, match="max_length must be an integer"):
        check_policy(Answering(1, max_length=0), drafter=True, confidence_head=True)
