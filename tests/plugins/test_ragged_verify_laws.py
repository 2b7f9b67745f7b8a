"""RaggedVerify's laws: shares over all numbers of a grid, and filters of large vocabularies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from verify_cases import LAST_U, Sequence, check, run

# --- laws, by all numbers of a grid ---------------------------------------------------------


def law_of(sequence: dict[str, Any], drafts: list[list[int]], *, block: int, n: int = 64) -> Any:
    """Shares of the first output token over a grid of n x n numbers, drafts equally often."""
    grid = (np.arange(n) + 0.5) / n
    vocab = sequence["logits"].shape[1]
    counts = np.zeros(vocab)
    for draft in drafts:
        for u in grid:
            sequences = [
                Sequence(
                    **sequence,
                    drafts=draft,
                    u_accept=np.full(block, u, np.float32),
                    u_recover=float(v),
                    u_bonus=float(v),
                )
                for v in grid
            ]
            for tokens in run(sequences, block=block):
                counts[tokens[0]] += 1
    return counts / counts.sum()


def logs(*values: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(values, np.float32))


def test_an_argmax_draft_is_judged_as_certain_not_by_its_softmax() -> None:
    """p = (.5, .3, .2), q's softmax (.6, .3, .1), the draft always 0: .5/.3/.2, not .83/0/.17."""
    sequence = {
        "logits": np.stack([logs(0.5, 0.3, 0.2)] * 2),
        "draft_logits": logs(0.6, 0.3, 0.1)[None],
        "draft_temperature": 0.0,
    }
    assert law_of(sequence, [[0]], block=1) == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def test_top_p_shapes_the_law_that_judges_drafts() -> None:
    """p = (.5, .3, .15, .05), top-p .75, q uniform: .625/.375/0/0."""
    sequence = {
        "logits": np.stack([logs(0.5, 0.3, 0.15, 0.05)] * 2),
        "draft_logits": np.zeros((1, 4), np.float32),
        "params": {"top_p": 0.75},
    }
    law = law_of(sequence, [[0], [1], [2], [3]], block=1, n=32)
    assert law == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert law[2] == law[3] == 0


# --- vocabularies larger than what is sorted first --------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 40},
        {"top_k": 512},
        {"top_k": 513},
        {"top_k": 1000},
        {"top_p": 0.3},
        {"top_p": 0.97},
        {"min_p": 0.4},
        {"min_p": 0.01},
        {"top_k": 1000, "top_p": 0.7},
        {"top_k": 600, "top_p": 0.9},
        {"top_k": 1000, "min_p": 0.4},
        {"top_k": 700, "top_p": 0.6, "min_p": 0.2},
        {"top_k": 100, "top_p": 0.7, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.4, 1.0, 3.0])
def test_filters_of_a_large_vocabulary(params: dict[str, Any], spread: float) -> None:
    """Laws that few ids make up and laws that all do; every cut is met by numbers from 0 to 1."""
    vocab = 1500
    rng = np.random.default_rng(9)
    logits = rng.normal(size=(1, vocab)).astype(np.float32) * np.float32(spread)
    numbers = [0.0, *(np.arange(1, 8) / 8), LAST_U]
    sequences = [Sequence(logits=logits, params=params, u_bonus=float(u)) for u in numbers]
    alone = check(sequences, block=0)
    mixed = [Sequence(logits=logits, params={"top_p": 0.999}, u_bonus=0.5), *sequences]
    assert check(mixed, block=0)[1:] == alone


def test_equal_logits_across_the_border_of_what_is_sorted_first() -> None:
    """Six hundred equal ids: top-k 520 keeps the 520 lowest of them."""
    logits = np.full((1, 1500), -50.0, np.float32)
    logits[0, 100:700] = 1.0
    for params, last in (({"top_k": 520}, 619), ({"top_k": 500}, 599), ({"top_p": 0.4995}, 399)):
        sequences = [Sequence(logits=logits, params=params, u_bonus=u) for u in (0.0, LAST_U)]
        assert run(sequences, block=0) == [[100], [last]]
