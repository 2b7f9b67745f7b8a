"""Sampled text has exactly the target's law, whatever drafts, judges and schedules it.

Targets of three and four tokens, laws enumerated from Transformers' logits, thousands of texts
through the engine in one ragged batch, chi-square over their first tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import load_target, tiny_drafter
from markov_pair import markov_pair
from sampled_law import BOUND, TargetLaws, heads, p_value, sample
from tiny_engine import tiny_engine

from dspark_trt.runtime import engine as engine_module
from dspark_trt.runtime.budget import BudgetView, NoDraft, Policy, Static, Threshold
from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.runtime.sampling import Uniforms, draw_uniforms

COUNT = 3000
PROMPT = [1, 2, 1]
SIZES: dict[str, Any] = {
    "max_batch_size": 128, "max_seq_len": 32, "max_num_tokens": 512, "page_size": 4,
}  # fmt: skip
BASE = SamplingParams(max_tokens=7, temperature=2.0, ignore_eos=True)


@dataclass
class Pair:
    """An engine and the laws of its target."""

    llm: LLM
    laws: TargetLaws
    vocab: int

    def p_values(self, params: SamplingParams, texts: list[Any]) -> list[float]:
        """Over the first three tokens, and over the first five (four of a larger vocabulary)."""
        lengths = (3, 5) if self.vocab == 3 else (2, 4)
        return [p_value(heads(texts, n), self.laws.joint(PROMPT, params, n=n)) for n in lengths]

    def check(self, params: SamplingParams, **options: Any) -> None:
        texts = sample(self.llm, PROMPT, params, count=COUNT, **options)
        values = self.p_values(params, texts)
        print([f"{p:.3g}" for p in values])
        assert min(values) > BOUND


def build(folder: Path, vocab: int, *, drafter: dict[str, Any] | None = None) -> Pair:
    """The pair's own drafter (accepted often), or a random one of `drafter`'s kind (hardly)."""
    target, good = markov_pair(folder, vocab, layers=1, hidden=32)
    chosen = good if drafter is None else tiny_drafter(folder, target, layers=1, **drafter)
    llm = LLM(tiny_engine(folder / "engine", target, chosen, **SIZES), threads=1)
    return Pair(llm, TargetLaws(load_target(target)), vocab)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build(tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build(tmp_path_factory.mktemp("four"), 4)


@dataclass(frozen=True)
class Alternating:
    """Drafts on every second step, and then verifies a share of what there is."""

    name: str = "alternating"
    synchronous: bool = False
    max_length: int | None = None
    share: float = 0.5
    asked: list[int] | None = None

    def budget(self, view: BudgetView) -> int:
        assert self.asked is not None
        self.asked.append(1)
        return int(view.room.sum() * self.share) if len(self.asked) % 2 else 0

    def lengths(self, conf: np.ndarray, room: np.ndarray) -> np.ndarray:
        raise AssertionError("asked of synchronous policies alone")


FIELDS: dict[str, dict[str, Any]] = {
    "plain sampling": {},
    "temperature 1": {"temperature": 1.0},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.25},
    "all filters": {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "temperature": 3.0},
    "repetition": {"repetition_penalty": 1.6},
    "presence and frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "penalties of the prompt": {"frequency_penalty": 0.8, "penalty_prompt": True},
    "bias": {"logit_bias": {1: -3.0, 2: 1.5}},
    "bad words": {"bad_words": ((2, 1), (1, 1, 2))},
    "argmax drafts": {"draft_temperature": 0.0},
    "cold drafts": {"draft_temperature": 0.5},
    "hot drafts": {"draft_temperature": 1e9},
    "argmax drafts, top-p": {"draft_temperature": 0.0, "top_p": 0.8},
    "cold drafts, penalties": {"draft_temperature": 0.7, "repetition_penalty": 1.5, "min_p": 0.1},
}


@pytest.mark.parametrize("name", FIELDS)
def test_three_tokens(three: Pair, name: str) -> None:
    three.check(replace(BASE, **FIELDS[name]))


@pytest.mark.parametrize("name", ["plain sampling", "all filters", "argmax drafts", "repetition"])
def test_four_tokens(four: Pair, name: str) -> None:
    four.check(replace(BASE, **FIELDS[name]))


@pytest.mark.parametrize(
    "policy",
    [
        NoDraft(),
        Static(1),
        Static(2),
        Threshold(0.0),
        Threshold(0.5),
        Threshold(0.9),
        Alternating(asked=[]),
        Alternating(asked=[], share=0.25),
    ],
    ids=repr,
)
def test_policies_do_not_change_the_law(three: Pair, policy: Policy) -> None:
    three.check(BASE, policy=policy)


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        ({"head": "vanilla", "block_size": 3}, Static()),
        ({"head": "gated", "confidence": "plain"}, Threshold(0.5)),
        ({"head": "rnn", "block_size": 2}, Threshold(0.3)),
        ({"head": None, "block_size": 5, "confidence": None}, Static()),
    ],
    ids=["vanilla", "gated", "rnn", "none"],
)
def test_a_drafter_very_different_from_the_target(
    tmp_path: Path, drafter: dict[str, Any], policy: Policy
) -> None:
    pair = build(tmp_path, 3, drafter=drafter)
    pair.check(BASE, policy=policy)


def test_each_of_a_mixed_batch_has_its_own_law(three: Pair) -> None:
    """Greedy, sampled, filtered and penalised requests side by side."""
    names = ["plain sampling", "top-k", "repetition", "argmax drafts", "bad words", "hot drafts"]
    mix = [replace(BASE, **FIELDS[name]) for name in names] + [replace(BASE, temperature=0.0)]
    texts = sample(three.llm, PROMPT, mix, count=COUNT * 2)
    for i, params in enumerate(mix[:-1]):
        assert min(three.p_values(params, texts[i :: len(mix)])) > BOUND, names[i]
    assert len(set(heads(texts[len(mix) - 1 :: len(mix)], 7))) == 1


def test_texts_end_by_the_law_of_the_end_id(four: Pair) -> None:
    """An end id is drawn with its own chance at every position, also inside a block."""
    params = replace(BASE, ignore_eos=False, max_tokens=4, temperature=4.0, logit_bias={0: 4.0})
    (end,) = four.llm.eos_token_ids
    texts = sample(four.llm, PROMPT, params, count=COUNT)
    law: dict[Any, float] = {}
    for tokens, chance in four.laws.joint(PROMPT, params, n=4).items():
        stop = tokens.index(end) if end in tokens else 4
        key = (tokens[:stop], "stop" if stop < 4 else "length")
        law[key] = law.get(key, 0.0) + chance
    assert 0.1 < sum(v for (_, reason), v in law.items() if reason == "stop") < 0.95
    assert p_value([(tuple(t.token_ids), t.finish_reason) for t in texts], law) > BOUND


def test_no_end_id_before_the_minimum(four: Pair) -> None:
    params = replace(
        BASE, ignore_eos=False, max_tokens=5, min_tokens=3, temperature=3.0, logit_bias={0: 4.0}
    )
    ends = four.llm.eos_token_ids
    texts = sample(four.llm, PROMPT, params, count=COUNT)
    law: dict[Any, float] = {}
    for tokens, chance in four.laws.joint(PROMPT, params, n=5, ends=ends).items():
        stop = next((i for i, t in enumerate(tokens) if t in ends), 5)
        law[tokens[:stop]] = law.get(tokens[:stop], 0.0) + chance
    assert min(len(t.token_ids) for t in texts) == 3
    assert p_value(heads(texts, 5), law) > BOUND


def test_a_token_biased_away_never_comes_at_any_position_of_a_block(four: Pair) -> None:
    params = replace(BASE, logit_bias={2: -100.0}, temperature=1.0)
    texts = sample(four.llm, PROMPT, params, count=1000)
    assert sum(len(t.token_ids) for t in texts) == 7000
    assert all(2 not in t.token_ids for t in texts)


# --- would it be seen? ------------------------------------------------------------------------


def test_a_slightly_hotter_law_is_seen(three: Pair) -> None:
    texts = sample(three.llm, PROMPT, BASE, count=2 * COUNT)
    assert min(three.p_values(BASE, texts)) > BOUND
    assert min(three.p_values(replace(BASE, temperature=2.2), texts)) < BOUND
    assert min(three.p_values(replace(BASE, logit_bias={1: 0.3}), texts)) < BOUND


def biased(three: Pair, monkeypatch: pytest.MonkeyPatch, draw: Any) -> float:
    monkeypatch.setattr(engine_module, "draw_uniforms", draw)
    return min(three.p_values(BASE, sample(three.llm, PROMPT, BASE, count=COUNT)))


def test_numbers_that_serve_twice_are_seen(three: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged_by_the_drafts(keys: Any, steps: Any, block: int) -> Uniforms:
        u = draw_uniforms(keys, steps, block)
        return Uniforms(u.draft, u.draft, u.extra)

    def recovered_by_the_judges(keys: Any, steps: Any, block: int) -> Uniforms:
        u = draw_uniforms(keys, steps, block)
        return Uniforms(u.draft, u.accept, u.accept[:, :2])

    for draw in (judged_by_the_drafts, recovered_by_the_judges):
        assert biased(three, monkeypatch, draw) < BOUND


def test_numbers_that_come_again_at_the_next_step_are_seen(
    three: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert biased(three, monkeypatch, lambda k, s, g: draw_uniforms(k, np.zeros_like(s), g)) < BOUND


def test_drafts_of_the_good_pair_are_accepted_and_rejected(three: Pair) -> None:
    texts = sample(three.llm, PROMPT, BASE, count=500)
    uncut = [n for t in texts for n in t.accepted_lengths_uncut]
    assert set(uncut) == {1, 2, 3, 4, 5}
