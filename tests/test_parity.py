"""The rule of equality itself: what it lets pass, what it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parity import (
    assert_close_logits,
    assert_same_greedy,
    first_difference,
    reference_along,
    top2_gap,
)


def never(position: int) -> float:
    raise AssertionError(f"the gap of position {position} was asked for")


def test_equal_texts_need_no_gap() -> None:
    assert assert_same_greedy([1, 2, 3], [1, 2, 3], never) is None


def test_a_difference_at_a_tie_is_tolerated_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert assert_same_greedy([1, 9, 9], [1, 2, 3], lambda i: 5e-5 * i) == 1
    printed = capsys.readouterr().out
    assert "token 1 is [9]" in printed and "5.00e-05" in printed


def test_a_difference_at_a_clear_choice_fails() -> None:
    with pytest.raises(AssertionError, match="token 2 is"):
        assert_same_greedy([1, 2, 9], [1, 2, 3], lambda i: 1e-4 * i)


@pytest.mark.parametrize("ours, reference", [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([], [7])])
def test_a_text_that_ends_early_differs_where_it_ends(
    ours: list[int], reference: list[int]
) -> None:
    assert first_difference(ours, reference) == min(len(ours), len(reference))
    with pytest.raises(AssertionError, match="absent|none"):
        assert_same_greedy(ours, reference, lambda i: 1.0)


def test_gap_of_the_two_largest() -> None:
    assert top2_gap(np.array([-1.0, 4.0, 3.5, -9.0])) == 0.5


def test_the_worst_position_is_named() -> None:
    reference = np.zeros((3, 2))
    with pytest.raises(AssertionError, match="position 1 of 3"):
        assert_close_logits(reference + [[0, 0], [0, 0.2], [0, 0.1]], reference, bound=0.05)


class Successor:
    """A model of three tokens whose argmax after token t is (t + 1) % 3, with a gap of 0.5."""

    def __call__(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=0.5 * torch.eye(3)[(input_ids + 1) % 3])


@pytest.mark.parametrize(
    "ours, ids",
    [
        ([1, 2, 0, 1], [1, 2, 0, 1]),
        ([1, 2], [1, 2, 0]),  # ours ends early: the reference goes on
        ([1, 0, 1], [1, 2]),  # ours leaves the text at token 1
        ([], [1]),
    ],
)
def test_reference_along_follows_ours_up_to_the_first_difference(
    ours: list[int], ids: list[int]
) -> None:
    found = reference_along(Successor(), [2, 0], ours, count=4)
    assert found.ids == ids
    assert found.gap(len(ids) - 1) == 0.5


def test_reference_along_stops_at_an_end_id() -> None:
    assert reference_along(Successor(), [0], [1, 2], count=9, end_ids=[0]).ids == [1, 2]
    assert reference_along(Successor(), [0], [1, 2, 0], count=9, end_ids=[0]).ids == [1, 2]
