"""Penalties, bias, bans and filters at every verified position, with that position's own prefix.

Greedy text under each of them is the oracle's, with drafts that are wrong, right up to some
position, or right throughout: so each edit has met every row of a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_recorder import Recorder, knowing
from engine_driver import BLOCK, PROMPTS, plain

from dspark_trt.runtime.budget import NoDraft
from dspark_trt.runtime.llm import LLM, SamplingParams

COUNT = 24
PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def oracle(pair_engine: Path) -> Any:
    from factories import load_target

    return load_target(pair_engine.parent / "markov-llama-target")


@pytest.fixture(scope="module")
def greedy(shared_llm: LLM) -> list[int]:
    return plain(shared_llm, [PROMPT], SamplingParams(max_tokens=COUNT, ignore_eos=True))[0]


def every_way(llm: LLM, params: SamplingParams, unedited: list[int]) -> list[int]:
    """The text of PROMPT under `params`, asserted to be the same whatever is drafted."""
    (expected,) = plain(llm, [PROMPT], params)
    assert llm.generate(PROMPT, params)[0].token_ids == expected
    for text in (expected, unedited):  # right drafts, and those that ignore the edits
        known = {tuple(PROMPT): [*text, *[5] * BLOCK]}
        for accepted in (1, 2, BLOCK):
            recorder = Recorder(llm, knowing(known, lambda r, n=accepted: n))  # type: ignore[misc]
            assert llm.generate(PROMPT, params)[0].token_ids == expected
            recorder.remove(llm)
    return expected


LAWS: dict[str, dict[str, Any]] = {
    "bias": {"bias": {7: 9.0, 30: -20.0, 102: 2.5}},
    "repetition": {"repetition_penalty": 1.8},
    "repetition-below-one": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 4.0},
    "frequency": {"frequency_penalty": 2.5},
    "negative-frequency": {"frequency_penalty": -0.7},
    "presence-and-prompt": {"presence_penalty": 4.0, "penalty_prompt": True},
    "frequency-and-prompt": {"frequency_penalty": 1.5, "penalty_prompt": True},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.9,
        "penalty_prompt": True,
        "bias": {7: 3.0, 102: 2.5},
    },
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_greedy_text_under_penalties_is_the_oracles(
    llm: LLM, oracle: Any, greedy: list[int], law: dict[str, Any]
) -> None:
    from reference.decode import decode_plain

    expected = decode_plain(oracle, PROMPT, n=COUNT, params=law | {"temperature": 0.0})
    fields = {name: value for name, value in law.items() if name != "bias"}
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, logit_bias=law.get("bias"), **fields)
    assert every_way(llm, params, greedy) == expected
    assert expected != greedy


def windows(text: list[int], size: int) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_bad_words_of_several_tokens(llm: LLM, greedy: list[int], size: int) -> None:
    """Banned wherever they would be completed, across drafts and the border to the prompt."""
    words = [greedy[i : i + size] for i in (0, 4, 9)]
    border = [PROMPT[-1], *greedy[: size - 1]]
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, bad_words=[*words, border])
    text = every_way(llm, params, greedy)
    found = windows([PROMPT[-1], *text] if size > 1 else text, size)
    assert not found & {tuple(word) for word in [*words, border]}
    assert text != greedy


def test_bad_words_as_text(llm: LLM, greedy: list[int]) -> None:
    word = llm.tokenizer.decode(greedy[5:6])
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True, bad_words=word)
    assert greedy[5] not in every_way(llm, params, greedy)


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_bans_hold_when_sampling(llm: LLM, temperature: float) -> None:
    banned = list(range(20, 90))
    pairs = [[a, b] for a in range(4, 20) for b in range(4, 12)]
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=temperature,
            bad_words=[*([t] for t in banned), *pairs],
            ignore_eos=True,
            seed=seed,
        )
        for seed in range(8)
    ]
    for done in llm.generate([PROMPT] * 8, params):
        assert not set(done.token_ids) & set(banned)
        assert not windows(done.token_ids, 2) & {tuple(pair) for pair in pairs}


def test_filters_leave_only_what_they_let_through(llm: LLM) -> None:
    """Every sampled token is among the survivors of its own row's raw logits."""
    cases = {
        "top_k": {"top_k": 2},
        "top_p": {"top_p": 0.6},
        "min_p": {"min_p": 0.3},
    }
    for name, filters in cases.items():
        params = SamplingParams(max_tokens=50, temperature=1.5, ignore_eos=True, **filters)
        for done in llm.generate(PROMPTS[:4], params, return_generation_logits=True):
            assert done.generation_logits is not None
            for row, token in zip(done.generation_logits, done.token_ids):
                law = np.exp((row - row.max()).astype(np.float64) / 1.5)
                law /= law.sum()
                larger = law[law > law[token]]
                survives = {
                    "top_k": len(larger) < 2,
                    "top_p": larger.sum() < 0.6 + 1e-6,
                    "min_p": law[token] >= 0.3 * law.max() - 1e-6,
                }
                assert survives[name]


def test_edits_of_mates_in_one_batch_stay_apart(llm: LLM) -> None:
    """A batch of differently edited requests gives each its own text."""
    each = [
        SamplingParams(max_tokens=COUNT, ignore_eos=True, **fields)
        for fields in (
            {},
            {"repetition_penalty": 1.5},
            {"logit_bias": {7: 6.0}},
            {"bad_words": [[102], [30, 125]]},
            {"frequency_penalty": 1.0, "penalty_prompt": True},
            {"min_tokens": 20, "stop_token_ids": [74, 102]},
        )
    ]
    alone = [llm.generate(p, s)[0].token_ids for p, s in zip(PROMPTS, each)]
    assert [c.token_ids for c in llm.generate(PROMPTS, each)] == alone
    llm.engine.policy = NoDraft()
    assert [c.token_ids for c in llm.generate(PROMPTS, each)] == alone
