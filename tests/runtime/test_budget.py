"""Policies: pure functions of what they are shown."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.runtime.budget import BudgetView, NoDraft, PolicyError, Static, Threshold

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
