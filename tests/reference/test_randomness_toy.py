"""Two ways to lose the target's law although every single verification is right.

Both use p = (.7, .3), q = (.5, .5) over tokens A, B at every position.

1. Look ahead (paper, appendix A): a scheduler that reads c_2, which depends on x_1, to decide
   whether x_1 is verified. Exact: P(A) = .85. Algorithm 1 stops before it looks: P(A) = .7.

2. Numbers keyed by token position. The budget of step t comes from the confidences of step t - 2
   (lawful: old data), G = 4, and the engine has been captured for 1 and for 5 rows, so K is 0 or 4.
   c_4 is high after x_3 = A and low after B, and that alone tips the budget: K_t = 4 if step t - 2
   drafted x_3 = A, else 0. When steps t - 2 and t - 1 commit one token each, the third position of
   the block of step t - 2 is the first of step t. If its draft is drawn with the same number again,
   it is the same token: the budget of step t has seen the very token it admits, which is case 1.
   Exact at the third token of a request (the first two steps have no budget yet): P(A) = .85.
   Over requests of 128 tokens: P(A) = .72 (5,000 requests: .7219 +- .0003). Keyed by step, a
   position that is drafted again meets fresh numbers: P(A) = .7 (.7005 +- .0004).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reference.law import Tokens, speculative_law, verify_block

A, G = 0, 4
P, Q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
TOKENS, REQUESTS = 128, 500


def first_token(*, length: Callable[[Tokens, Tokens], int], block_size: int) -> tuple[float, float]:
    """The exact law of the first committed token under a length rule."""
    joint = speculative_law(
        lambda prefix: P, lambda prefix, drafted: Q, block_size=block_size, n=1, length=length
    )
    return joint[(0,)], joint[(1,)]


# --- 1. appendix A ------------------------------------------------------------------------

SPS = {1: 1.0, 2: 0.5, 3: 0.45}  # steps per second by rows


def survivals(block: Tokens) -> list[float]:
    """a_1 = .8; a_2 = a_1 c_2 with c_2 = .9 after x_1 = A and 0 after B."""
    return [0.8, 0.8 * (0.9 if block[0] == A else 0.0)]


def retrospective(prefix: Tokens, block: Tokens) -> int:
    """argmax of Theta over all lengths, after looking at all of them."""
    a = survivals(block)
    return int(np.argmax([(1 + sum(a[:k])) * SPS[1 + k] for k in range(3)]))


def early_stop(prefix: Tokens, block: Tokens) -> int:
    """Algorithm 1 for one request: stop at the first length that brings no gain."""
    tau, best, length = 1.0, SPS[1], 0
    for k, survival in enumerate(survivals(block)):
        tau += survival
        theta = tau * SPS[2 + k]
        if survival <= 0 or theta <= best:
            break
        best, length = theta, k + 1
    return length


def test_retrospective_search_gives_85_15() -> None:
    assert [retrospective((), (x, 0)) for x in (0, 1)] == [2, 0]
    assert first_token(length=retrospective, block_size=2) == pytest.approx((0.85, 0.15))


def test_early_stop_gives_the_target_law() -> None:
    assert [early_stop((), (x, 0)) for x in (0, 1)] == [0, 0]
    assert first_token(length=early_stop, block_size=2) == pytest.approx((0.7, 0.3))


# --- 2. numbers by position and by step ---------------------------------------------------

STEP_COST = [1.0, 3.2, 3.2, 3.2, 3.2]  # T(1, K): one row, or the tier of five rows


def budget(block: list[int]) -> int:
    """argmax_K (1 + a_1 + .. + a_K) / T(1, K) with c = .8, .8, .8 and c_4 = .9 or .1."""
    confidences = [0.8, 0.8, 0.8, 0.9 if block[2] == A else 0.1]
    survival = np.cumprod(confidences)
    return int(np.argmax([(1 + survival[:k].sum()) / STEP_COST[k] for k in range(G + 1)]))


def decode(keyed_by: str, generator: np.random.Generator) -> list[int]:
    """One request of `TOKENS` tokens under the lagged budget; no data yet means K = 0."""
    numbers = generator.random((4, TOKENS + G + 1, G + 1)).tolist()
    output: list[int] = []
    budgets = [0, 0]
    for step in range(TOKENS):
        start = len(output)  # position of the block's first draft
        if start >= TOKENS:
            break

        def draw(stream: int, k: int, step: int = step, start: int = start) -> float:
            row, column = (step, k) if keyed_by == "step" else (start + k, 0)
            return numbers[stream][row][column]

        block = [int(draw(0, k) >= Q[A]) for k in range(G)]
        budgets.append(budget(block))
        l = budgets[step]  # noqa: E741  decided by the block of step - 2
        accepts = [draw(1, k) for k in range(l)]
        # The last token's own position is not known before the accepts are; both are iid here.
        stop = next((k for k in range(l) if accepts[k] * Q[block[k]] >= P[block[k]]), l)
        output += verify_block(
            [P] * (l + 1), [Q] * l, block[:l], accepts, draw(2, stop), draw(3, stop)
        )
    return output[:TOKENS]


def share_of_a(keyed_by: str) -> tuple[float, float]:
    """(over all tokens, at the third token): the share of A."""
    generator = np.random.default_rng(7)
    texts = np.array([decode(keyed_by, generator) for _ in range(REQUESTS)])
    return float((texts == A).mean()), float((texts[:, 2] == A).mean())


def test_budget_is_all_or_nothing_by_the_third_draft() -> None:
    for bits in range(16):
        block = [bits >> k & 1 for k in range(G)]
        assert budget(block) == (G if block[2] == A else 0)


def test_numbers_keyed_by_position_bias_the_law() -> None:
    overall, third = share_of_a("position")
    assert overall == pytest.approx(0.721, abs=0.006)
    assert third == pytest.approx(0.85, abs=0.05)


def test_numbers_keyed_by_step_do_not() -> None:
    overall, third = share_of_a("step")
    assert overall == pytest.approx(0.7, abs=0.006)
    assert third == pytest.approx(0.7, abs=0.06)


def test_third_token_by_position_is_a_budget_that_has_seen_its_own_token() -> None:
    law = first_token(length=lambda prefix, block: G if block[0] == A else 0, block_size=G)
    assert law == pytest.approx((0.85, 0.15))
