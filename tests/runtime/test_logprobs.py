"""What is kept of a step's logits, and for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_trt.runtime.batcher import ScheduledChunk, ScheduledStep
from dspark_trt.runtime.executor_onnxruntime import Verdict
from dspark_trt.runtime.logprobs import LogitRows, token_logprobs
from dspark_trt.runtime.request import Request, new_request
from dspark_trt.runtime.sampling_params import SamplingParams

VOCAB = 6


def test_log_softmax_of_the_raw_logits() -> None:
    logits = np.array([1.0, 3.0, -2.0, 3.0], np.float32)
    law = np.log(np.exp(logits) / np.exp(logits).sum())
    found = token_logprobs(logits, 2, 0)
    assert (found.token_id, found.top) == (2, ())
    assert found.logprob == pytest.approx(law[2], abs=1e-6)


def test_the_likeliest_come_first_and_ties_by_id() -> None:
    logits = np.array([1.0, 3.0, -2.0, 3.0, 3.0], np.float32)
    found = token_logprobs(logits, 0, 2)
    assert [token for token, _ in found.top] == [1, 3]
    assert [token for token, _ in token_logprobs(logits, 0, 4).top] == [1, 3, 4, 0]


def test_no_more_than_the_vocabulary() -> None:
    found = token_logprobs(np.array([0.0, 1.0, 2.0], np.float32), 0, 20)
    assert [token for token, _ in found.top] == [2, 1, 0]
    assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1.0)


def test_large_logits_do_not_overflow() -> None:
    found = token_logprobs(np.array([3e4, -3e4, 3e4], np.float32), 1, 1)
    assert found.top == ((0, pytest.approx(np.log(0.5))),)
    assert found.logprob == pytest.approx(-6e4, rel=1e-4)


def request(prompt: list[int], **settings: Any) -> Request:
    made = new_request(
        request_id="r",
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=4, logprobs=settings.pop("logprobs", None)),
        vocab_size=VOCAB,
        max_prompt_len=10,
        max_seq_len=20,
        eos_token_ids=(),
    )
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def rows_of(count: int) -> np.ndarray:
    """Row i has its peak at token i."""
    return (10.0 * np.eye(count, VOCAB)).astype(np.float32)


def verdict(logits: np.ndarray | None, lengths: list[int]) -> Verdict:
    none = np.zeros((0, 0), np.int32)
    return Verdict(none, none, np.array(lengths, np.int32), logits, 0.0)


def test_rows_are_found_behind_chunks_and_drafts() -> None:
    first = request([1, 2, 3], keep_context_logits=True)
    going_on = request([1, 2, 3])
    last_chunk = request([1, 2], logprobs=1)
    deciding = request([1], logprobs=1, output_ids=[2])
    after = request([1], generation_logits=[], output_ids=[2])
    plan = ScheduledStep(
        chunks=[
            ScheduledChunk(first, 0, 2),  # rows 0, 1
            ScheduledChunk(going_on, 0, 2),  # none
            ScheduledChunk(last_chunk, 1, 2),  # row 2
        ],
        decode=[deciding, after],  # rows 3, 4 (one draft) and 5
    )
    rows = LogitRows(plan, verdict(rows_of(6), [1, 0]))
    for i, chunk in enumerate(plan.chunks):
        rows.keep_context(i, chunk.request)
    assert np.concatenate(first.context_logits).argmax(axis=1).tolist() == [0, 1]
    assert going_on.context_logits == last_chunk.context_logits == []
    (found,) = rows.of(2, last_chunk, [2])
    assert found.logprob == found.top[0][1] and found.top[0][0] == 2
    assert [r.top[0][0] for r in rows.of(3, deciding, [3, 4])] == [3, 4]
    assert rows.of(4, after, [5]) is None
    assert after.generation_logits[0].argmax(axis=1).tolist() == [5]


def test_nothing_is_kept_where_nobody_asked() -> None:
    plain = request([1, 2])
    plan = ScheduledStep(chunks=[ScheduledChunk(plain, 0, 2)])
    rows = LogitRows(plan, verdict(None, []))
    rows.keep_context(0, plain)
    assert rows.of(0, plain, [1]) is None
    assert plain.context_logits == []


def test_a_prompt_computed_again_gives_its_context_logits_once() -> None:
    again = request([1, 2], keep_context_logits=True, output_ids=[3])
    rows = LogitRows(ScheduledStep(chunks=[ScheduledChunk(again, 0, 2)]), verdict(rows_of(1), []))
    rows.keep_context(0, again)
    assert again.context_logits == []
