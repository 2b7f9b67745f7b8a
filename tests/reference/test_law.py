"""The reference laws: sampling parameters by hand, exact losslessness by enumeration."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from reference.law import (
    JointLaw,
    Law,
    Tokens,
    distance,
    draft_law,
    inverse_cdf,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    one_hot_argmax,
    plain_law,
    residual_law,
    softmax,
    speculative_law,
    target_law,
    verify_block,
)

EXACT = 1e-12


def law(*values: float) -> Law:
    return np.array(values, np.float64)


def logits(*values: float) -> Law:
    """Logits whose softmax is the given law."""
    return np.log(law(*values))


class RandomTable:
    """A random but fixed row of logits [V] for every key: the same key gives the same row."""

    def __init__(self, vocab: int, *, seed: int, spread: float = 1.5) -> None:
        self.vocab, self.seed, self.spread = vocab, seed, spread
        self.rows: dict[Any, Law] = {}

    def __call__(self, *key: Tokens) -> Law:
        if key not in self.rows:
            flat = [self.seed, *(len(part) for part in key), *(t for part in key for t in part)]
            generator = np.random.default_rng(flat)
            self.rows[key] = generator.normal(size=self.vocab) * self.spread
        return self.rows[key]


# --- sampling parameters, one at a time -------------------------------------------------


def test_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    row = law(1.0, 3.0, 3.0, 0.0)
    assert target_law(row, temperature=0.0).tolist() == [0, 1, 0, 0]
    assert draft_law(row, 0.0).tolist() == [0, 1, 0, 0]
    assert target_law(row, temperature=0.0, bias={2: 0.1}).tolist() == [0, 0, 1, 0]


def test_temperature_divides_logits() -> None:
    assert np.allclose(target_law(law(0, 2), temperature=2.0), softmax(law(0, 1)))
    assert np.allclose(draft_law(law(0, 2), 0.5), softmax(law(0, 4)))


def test_top_k_keeps_exactly_k_with_ties_to_the_lowest_ids() -> None:
    p = law(0.2, 0.3, 0.2, 0.3)
    assert np.allclose(keep_top_k(p, 3), law(0.2, 0.3, 0, 0.3) / 0.8)
    assert np.allclose(keep_top_k(p, 1), law(0, 1, 0, 0))
    for off in (0, -1, 4, 9_999_999):
        assert np.array_equal(keep_top_k(p, off), p)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    p = law(0.1, 0.5, 0.25, 0.15)
    assert np.allclose(keep_top_p(p, 0.5), law(0, 1, 0, 0))
    assert np.allclose(keep_top_p(p, 0.51), law(0, 2, 1, 0) / 3)
    assert np.allclose(keep_top_p(p, 1e-9), law(0, 1, 0, 0))
    assert np.array_equal(keep_top_p(p, 1.0), p)
    assert np.allclose(keep_top_p(law(0.25, 0.25, 0.25, 0.25), 0.6), law(1, 1, 1, 0) / 3)


def test_min_p_is_relative_to_the_largest() -> None:
    p = law(0.1, 0.5, 0.25, 0.15)
    assert np.allclose(keep_min_p(p, 0.3), law(0, 50, 25, 15) / 90)
    assert np.array_equal(keep_min_p(p, 0.0), p)


def test_top_p_acts_on_the_law_renormalised_after_top_k() -> None:
    """After top-k 2 the first token has 5/8 of the mass, more than .6."""
    p = target_law(logits(0.5, 0.3, 0.15, 0.05), top_k=2, top_p=0.6)
    assert np.allclose(p, law(1, 0, 0, 0))
    assert np.allclose(target_law(logits(0.5, 0.3, 0.15, 0.05), top_p=0.6), law(5, 3, 0, 0) / 8)


def test_penalties_count_as_said() -> None:
    row = law(2.0, -2.0, 1.0, 0.0)
    prompt, output = [0, 1, 0], [2, 2]

    def edited(**options: Any) -> Law:
        p = target_law(row, prompt_ids=prompt, output_ids=output, **options)
        return np.log(p)

    def same(a: Law, *b: float) -> bool:
        return np.allclose(a - a[3], law(*b) - b[3])

    assert same(edited(repetition_penalty=2.0), 1.0, -4.0, 0.5, 0.0)
    assert same(edited(presence_penalty=0.5), 2.0, -2.0, 0.5, 0.0)
    assert same(edited(frequency_penalty=0.5), 2.0, -2.0, 0.0, 0.0)
    assert same(edited(presence_penalty=0.5, penalty_prompt=True), 1.5, -2.5, 0.5, 0.0)
    assert same(edited(frequency_penalty=0.5, penalty_prompt=True), 1.0, -2.5, 0.0, 0.0)
    both = edited(repetition_penalty=2.0, presence_penalty=0.25, bias={2: 1.0, 3: 0.0})
    assert same(both, 1.0, -4.0, 0.75, 0.0)  # (1 + 1) / 2 - .25: bias, repetition, presence


def test_bans_come_after_bias_and_before_the_rest() -> None:
    p = target_law(law(3.0, 1.0, 0.0), bias={0: 50.0}, banned=[0], top_k=1)
    assert p.tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="banned"):
        target_law(law(1.0, 2.0), banned=[0, 1])


def test_order_of_dense_and_sparse_bias_is_the_same() -> None:
    row = law(0.3, -1.0, 2.0)
    dense, sparse = np.array([0.0, 2.0, -np.inf]), {1: 2.0, 2: -np.inf}
    assert np.allclose(target_law(row, bias=dense), target_law(row, bias=sparse))


# --- one verification ---------------------------------------------------------------------


def test_inverse_cdf_is_ascending_and_never_meets_mass_zero() -> None:
    p = law(0.0, 0.25, 0.0, 0.75, 0.0)
    assert [inverse_cdf(p, u) for u in (0.0, 0.2499, 0.25, 0.999999)] == [1, 1, 3, 3]
    assert inverse_cdf(law(0.5, 0.5 - 1e-12, 0.0), 1 - 1e-16) == 1


def test_verify_block_by_hand() -> None:
    p, q = law(0.5, 0.3, 0.2), law(0.2, 0.3, 0.5)
    rows = {"p_rows": [p, p, p], "q_rows": [q, q]}
    # token 2 is accepted below .2 / .5; token 0 and 1 always; the residual is token 0 alone.
    assert verify_block(**rows, draft_tokens=[2, 1], u_accept=[0.39, 0.99], u_recover=0.9,
                        u_bonus=0.7) == [2, 1, 1]  # fmt: skip
    assert verify_block(**rows, draft_tokens=[1, 2], u_accept=[0.99, 0.4], u_recover=0.9,
                        u_bonus=0.7) == [1, 0]  # fmt: skip
    assert verify_block([p], [], [], [], u_recover=0.0, u_bonus=0.9) == [2]


def test_verify_block_at_temperature_zero_is_equality_with_argmax() -> None:
    rows = [one_hot_argmax(law(*r)) for r in ((1, 5, 5), (3, 0, 1), (0, 0, 9))]
    q = [law(0.2, 0.5, 0.3)] * 2
    for drafts, expected in (((1, 0), [1, 0, 2]), ((2, 0), [1]), ((1, 1), [1, 0])):
        for u in (0.0, 0.999999):
            assert verify_block(rows, q, drafts, [u, u], u, u) == expected


def test_verify_block_draws_the_law_that_is_enumerated() -> None:
    p, q = RandomTable(3, seed=5), RandomTable(3, seed=6)

    @cache
    def p_law(prefix: Tokens) -> Law:
        return softmax(p(prefix))

    @cache
    def q_law(prefix: Tokens, drafted: Tokens) -> Law:
        return softmax(q(prefix, drafted))

    generator, counts, n = np.random.default_rng(0), Counter[Tokens](), 10_000
    for _ in range(n):
        drafts: Tokens = ()
        for _ in range(2):
            drafts += (inverse_cdf(q_law((), drafts), generator.random()),)
        u = generator.random(4).tolist()
        committed = verify_block(
            [p_law(drafts[:k]) for k in range(3)],
            [q_law((), drafts[:k]) for k in range(2)],
            drafts, u[:2], u[2], u[3],
        )  # fmt: skip
        counts[tuple(committed[:1])] += 1
    expected = speculative_law(p_law, q_law, block_size=2, n=1)
    assert distance(expected, plain_law(p_law, n=1)) < EXACT
    for token, mass in expected.items():
        assert abs(counts[token] / n - mass) < 4 * np.sqrt(mass * (1 - mass) / n)


# --- exact losslessness -------------------------------------------------------------------

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 2},
    {"top_p": 0.7},
    {"top_k": 3, "top_p": 0.8, "min_p": 0.2},
    {"repetition_penalty": 1.7, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    {"frequency_penalty": 1.0, "penalty_prompt": True, "bias": {0: -3.0}, "top_p": 0.9},
    {"banned": [1], "min_p": 0.1},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("draft_temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(("vocab", "block_size", "n"), [(3, 1, 3), (3, 3, 3), (4, 2, 3), (4, 4, 2)])
def test_speculative_law_is_the_plain_law(
    params: dict[str, Any], draft_temperature: float, vocab: int, block_size: int, n: int
) -> None:
    prompt = (2, 0)
    p, q = RandomTable(vocab, seed=1), RandomTable(vocab, seed=101)

    @cache
    def p_law(prefix: Tokens) -> Law:
        return target_law(p(prefix), prompt_ids=prompt, output_ids=prefix, **params)

    @cache
    def q_law(prefix: Tokens, drafted: Tokens) -> Law:
        return draft_law(q(prefix, drafted), draft_temperature)

    plain = plain_law(p_law, n=n)
    assert abs(sum(plain.values()) - 1) < EXACT
    assert distance(plain, speculative_law(p_law, q_law, block_size=block_size, n=n)) < EXACT


@pytest.mark.parametrize("draft_temperature", [0.0, 1.0])
def test_any_length_rule_that_does_not_look_ahead_is_lossless(draft_temperature: float) -> None:
    """Stop before position k as long as the rule reads x_1 .. x_{k-1} alone."""
    p, q = RandomTable(3, seed=8), RandomTable(3, seed=9)

    def p_law(prefix: Tokens) -> Law:
        return softmax(p(prefix))

    def q_law(prefix: Tokens, drafted: Tokens) -> Law:
        return draft_law(q(prefix, drafted), draft_temperature)

    def stop_after_a_two(prefix: Tokens, block: Tokens) -> int:
        return next((k + 1 for k, token in enumerate(block) if token == 2), len(block))

    def by_history(prefix: Tokens, block: Tokens) -> int:
        return sum(prefix) % 3

    for rule in (stop_after_a_two, by_history, lambda prefix, block: 0):
        law_ = speculative_law(p_law, q_law, block_size=3, n=3, length=rule)
        assert distance(law_, plain_law(p_law, n=3)) < EXACT


def test_length_rule_that_looks_at_its_own_token_is_not_lossless() -> None:
    """ "Do not verify a 2": the same rule, one position early, is caught by the enumeration."""

    def stop_before_a_two(prefix: Tokens, block: Tokens) -> int:
        return next((k for k, token in enumerate(block) if token == 2), len(block))

    p, q = law(0.5, 0.3, 0.2), law(0.2, 0.3, 0.5)
    biased = speculative_law(
        lambda x: p, lambda x, d: q, block_size=2, n=1, length=stop_before_a_two
    )
    assert abs(biased[(2,)] - 0.5 * 0.2) < EXACT  # drawn afresh half of the time, else never
    assert distance(biased, plain_law(lambda x: p, n=1)) > 0.05


# --- field lessons ------------------------------------------------------------------------


def test_c02_argmax_drafts_are_one_hot() -> None:
    p, q = law(0.5, 0.3, 0.2), law(0.6, 0.3, 0.1)
    right = speculative_law(lambda x: p, lambda x, d: one_hot_argmax(q), block_size=1, n=1)
    assert distance(right, {(0,): 0.5, (1,): 0.3, (2,): 0.2}) < EXACT
    # Reporting the softmax of an argmax draft: always token 0, judged as if drawn from q.
    accept = min(1.0, p[0] / q[0])
    wrong = accept * one_hot_argmax(q) + (1 - accept) * residual_law(p, q)
    assert np.allclose(wrong, [0.83, 0.0, 0.17], atol=0.005)


def test_c04_top_p_shapes_the_target_in_the_accept_test() -> None:
    raw, q = law(0.5, 0.3, 0.15, 0.05), np.full(4, 0.25)
    p = target_law(np.log(raw), top_p=0.75)
    right = speculative_law(lambda x: p, lambda x, d: q, block_size=2, n=1)
    assert distance(right, {(0,): 0.625, (1,): 0.375}) < EXACT
    # Masking the recovery alone: drafts are judged by the raw law.
    accept = np.minimum(1.0, raw / q) * q
    wrong = accept + (1 - accept.sum()) * residual_law(p, q)
    assert np.allclose(wrong[2:], [0.15, 0.05])


def test_c06_two_positions_give_the_product_law() -> None:
    """All 9 pairs, against the product of the marginals; a wrong residual is far from it."""
    first, second = law(0.5, 0.3, 0.2), law(0.1, 0.2, 0.7)
    q = law(0.2, 0.5, 0.3)

    def p_law(prefix: Tokens) -> Law:
        return first if not prefix else second

    pairs = speculative_law(p_law, lambda x, d: q, block_size=2, n=2)
    product: JointLaw = {(a, b): first[a] * second[b] for a in range(3) for b in range(3)}
    assert len(pairs) == 9 and distance(pairs, product) < EXACT
    accept = np.minimum(1.0, first / q) * q
    wrong = accept + (1 - accept.sum()) * first  # a rejection drawn from p, not from the residual
    assert np.abs(wrong - first).max() > 0.05


def test_c08_exact_ties_give_the_lowest_id() -> None:
    row = np.zeros(49152)
    row[[5, 17, 49151]] = 3.0
    assert one_hot_argmax(row)[5] == 1.0
    assert target_law(row, top_k=1)[5] == 1.0
    assert target_law(row, top_p=1e-6)[5] == 1.0
