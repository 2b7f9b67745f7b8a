"""Too few pages, and slots that change hands: whoever comes next never notices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_driver import GREEDY, PROMPTS, drain, ids, plain, submit, texts

from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.runtime.sampling_params import RequestError


@pytest.fixture(scope="module")
def short_of_pages(pair_engine: Path) -> LLM:
    """13 pages of 8 tokens: two requests of 50 tokens hardly fit."""
    return LLM(pair_engine, threads=1, kv_pages=13)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_short_of_pages_the_text_is_the_same(
    llm: LLM, short_of_pages: LLM, temperature: float
) -> None:
    """Preempted and computed again: tokens, logprobs and accepted lengths stay."""
    params = [
        SamplingParams(
            max_tokens=30 + 7 * i,
            temperature=temperature,
            ignore_eos=True,
            logprobs=2,
            seed=i,
            frequency_penalty=0.3 * (i % 2),
            logit_bias={9: 1.5} if i == 2 else None,
        )
        for i in range(6)
    ]
    prompts = [*PROMPTS[:3], *PROMPTS[4:], ids(12, 77)]
    expected = llm.generate(prompts, params)
    before = short_of_pages.engine.batcher.preemptions
    requests = [
        submit(short_of_pages, p, **{f: getattr(s, f) for f in SamplingParams.__slots__})
        for p, s in zip(prompts, params)
    ]
    drain(short_of_pages)
    assert short_of_pages.engine.batcher.preemptions > before
    assert short_of_pages.pool.num_free == short_of_pages.pool.capacity == 13
    for request, whole in zip(requests, expected):
        assert request.output_ids == whole.token_ids
        assert request.accepted_lengths == whole.accepted_lengths
        assert request.logprobs is not None and whole.logprobs is not None
        ours = [p.logprob for p in request.logprobs]
        theirs = [p.logprob for p in whole.logprobs]
        np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_context_logits_survive_a_preemption_within_the_prompt(
    llm: LLM, short_of_pages: LLM
) -> None:
    prompts = [ids(20, 1), ids(60, 2)]
    params = [SamplingParams(max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=5)]
    expected = llm.generate(prompts, params, return_context_logits=True)
    done = short_of_pages.generate(prompts, params, return_context_logits=True)
    for ours, whole in zip(done, expected):
        assert ours.token_ids == whole.token_ids
        assert ours.context_logits is not None and whole.context_logits is not None
        np.testing.assert_allclose(ours.context_logits, whole.context_logits, atol=1e-4)


def test_a_request_beyond_all_pages_is_refused_before_anything_runs(short_of_pages: LLM) -> None:
    short_of_pages.engine.metrics.reset()
    with pytest.raises(RequestError, match="need 14 KV pages of 8 tokens, the cache has 13"):
        short_of_pages.generate([PROMPTS[0], ids(85)], SamplingParams(max_tokens=20))
    assert short_of_pages.engine.metrics.steps == 0
    assert short_of_pages.engine.batcher.idle


def test_a_slots_next_request_meets_nothing_of_the_last(pair_engine: Path) -> None:
    """Penalties, bias and filters of old requests are gone, also beside mates that have them."""
    fresh = LLM(pair_engine, threads=1)
    wanted = plain(fresh, PROMPTS[:4], GREEDY)
    loud = SamplingParams(
        max_tokens=20,
        temperature=0.9,
        top_k=3,
        repetition_penalty=3.0,
        frequency_penalty=2.0,
        presence_penalty=1.0,
        penalty_prompt=True,
        logit_bias=dict.fromkeys(range(4, 40), 20.0),
        min_tokens=20,
        bad_words=[[50], [4, 5]],
    )
    fresh.generate(PROMPTS[:4], loud)  # every slot has been used
    mixed = [GREEDY, loud, GREEDY, GREEDY]
    for _ in range(2):
        done = texts(fresh.generate(PROMPTS[:4], mixed))
        assert [done[0], done[2], done[3]] == [wanted[0], wanted[2], wanted[3]]
    assert texts(fresh.generate(PROMPTS[:4], GREEDY)) == wanted


def test_penalties_start_from_zero_in_every_request(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, frequency_penalty=1.0, ignore_eos=True)
    first = texts(llm.generate(PROMPTS[:4], params))
    assert texts(llm.generate(PROMPTS[:4], params)) == first
    assert first != plain(llm, PROMPTS[:4], SamplingParams(max_tokens=30, ignore_eos=True))
