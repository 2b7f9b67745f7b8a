"""Driving `pair_engine` (conftest.py) by hand: requests submitted, steps audited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_trt.runtime.budget import NoDraft
from dspark_trt.runtime.llm import LLM, Completion, SamplingParams
from dspark_trt.runtime.request import Request, new_request

VOCAB, BLOCK, SEQ = 128, 4, 128


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, count).tolist()


PROMPTS = [ids(count, seed) for seed, count in enumerate((7, 1, 16, 40, 9, 3))]


def submit(llm: LLM, prompt: Sequence[int], **params: Any) -> Request:
    limits = llm.manifest.limits
    request = new_request(
        request_id="test",
        prompt_ids=prompt,
        params=SamplingParams(**params),
        vocab_size=VOCAB,
        max_prompt_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        tokenizer=llm.tokenizer,
    )
    llm.engine.add(request)
    return request


def audit(llm: LLM) -> None:
    """Free and held pages are all pages, and no page is held twice."""
    held = [page for r in llm.engine.batcher.running for page in r.pages]
    assert len(set(held)) == len(held)
    assert llm.pool.num_free + len(held) == llm.pool.capacity


def drain(llm: LLM) -> None:
    """Step until idle, audited after every step; the device's lengths are the host's."""
    while not llm.engine.batcher.idle:
        llm.engine.step()
        audit(llm)
        for r in llm.engine.batcher.running:
            assert llm.executor.state.arrays["kv_len"][r.slot] == r.kv_len


def texts(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


def plain(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    """Tokens without drafts."""
    before, llm.engine.policy = llm.engine.policy, NoDraft()
    done = texts(llm.generate(prompts, params))
    llm.engine.policy = before
    return done


GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
