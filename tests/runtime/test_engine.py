"""The step loop: requests that join, leave, are cancelled, end; nothing that grows."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from draft_recorder import Recorder, knowing
from engine_driver import (
    BLOCK,
    GREEDY,
    PROMPTS,
    SEQ,
    audit,
    drain,
    ids,
    plain,
    submit,
    texts,
)

from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.runtime.request import Status


def test_requests_join_and_leave_between_steps(llm: LLM) -> None:
    expected = {tuple(p): plain(llm, [p], GREEDY)[0] for p in PROMPTS}
    llm.engine.metrics.reset()
    requests = []
    for i, prompt in enumerate(PROMPTS):
        requests.append(submit(llm, prompt, max_tokens=10 + 5 * i, ignore_eos=True))
        for _ in range(i % 3):
            llm.engine.step()
            audit(llm)
    drain(llm)
    for request in requests:
        assert request.output_ids == expected[tuple(request.prompt_ids)][: request.max_tokens]
        assert 1 + sum(request.accepted_lengths) == len(request.output_ids)
    assert llm.engine.metrics.mean_accepted_length > 1.5  # drafts were accepted


def test_a_step_gives_the_requests_it_touched(llm: LLM) -> None:
    long, short = submit(llm, ids(100), max_tokens=1), submit(llm, ids(3), max_tokens=3)
    assert llm.engine.step() == []  # 64 rows of the first prompt
    assert llm.engine.step() == [long, short]
    assert llm.engine.step() == [short]
    drain(llm)
    assert llm.engine.step() == []  # idle


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_pages_at_their_borders(llm: LLM, accepted: int) -> None:
    """Prompt lengths around the page size, each number of accepted drafts: audited every step."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [ids(length, length) for length in (15, 16, 17, 31, 32, 33)]
    expected = plain(llm, prompts, params)
    known = {tuple(p): t for p, t in zip(prompts, expected)}
    recorder = Recorder(llm, knowing(known, lambda r: accepted))
    requests = [submit(llm, p, max_tokens=24, ignore_eos=True) for p in prompts]
    drain(llm)
    recorder.remove(llm)
    assert [r.output_ids for r in requests] == expected
    assert llm.pool.num_free == llm.pool.capacity


def test_cancelling_between_steps_frees_pages_and_disturbs_nobody(llm: LLM) -> None:
    expected = plain(llm, PROMPTS[:3], GREEDY)
    requests = [submit(llm, p, max_tokens=40, ignore_eos=True) for p in PROMPTS[:3]]
    waiting = [submit(llm, p, max_tokens=40) for p in PROMPTS[3:]]  # one runs, two wait
    for _ in range(4):
        llm.engine.step()
    held = len(requests[1].pages)
    free = llm.pool.num_free
    llm.engine.cancel(requests[1])
    assert llm.pool.num_free == free + held
    for request in waiting:
        llm.engine.cancel(request)
        audit(llm)
    drain(llm)
    assert requests[1].finish_reason == "cancelled"
    assert requests[1].output_ids == expected[1][: len(requests[1].output_ids)]
    assert [requests[0].output_ids, requests[2].output_ids] == [expected[0], expected[2]]
    llm.engine.cancel(requests[0])  # too late: nothing changes
    assert requests[0].finish_reason == "length"


def test_cancelling_within_a_prompt(llm: LLM) -> None:
    request = submit(llm, ids(100), max_tokens=5)
    llm.engine.step()
    assert 0 < request.kv_len < 100
    llm.engine.cancel(request)
    assert (request.slot, request.output_ids) == (None, [])
    assert llm.pool.num_free == llm.pool.capacity


@pytest.mark.parametrize("count", [0, 1, 2, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK + 3])
def test_max_tokens_is_exact_with_drafts_that_are_all_right(llm: LLM, count: int) -> None:
    expected = plain(llm, PROMPTS[:4], GREEDY)
    known = {tuple(p): t for p, t in zip(PROMPTS, expected)}
    recorder = Recorder(llm, knowing(known, lambda r: BLOCK))
    done = llm.generate(PROMPTS[:4], SamplingParams(max_tokens=count, ignore_eos=True))
    recorder.remove(llm)
    for completion, text in zip(done, expected):
        assert completion.token_ids == text[:count]
        assert completion.finish_reason == "length"
        blocks, rest = divmod(max(count - 1, 0), BLOCK + 1)
        lengths = [BLOCK + 1] * blocks + [rest] * (rest > 0)
        assert completion.accepted_lengths == lengths


def test_no_model_work_for_no_tokens(llm: LLM) -> None:
    llm.generate(PROMPTS, SamplingParams(max_tokens=0))
    assert llm.engine.metrics.steps == 0


def test_the_end_of_the_context(llm: LLM) -> None:
    """Several prompts within a block of the longest context, their drafts all right."""
    prompts = [ids(SEQ - room, room) for room in (1, 2, 4, 5, 9)]
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    expected = plain(llm, prompts, params)
    known = {tuple(p): [*t, *[4] * BLOCK] for p, t in zip(prompts, expected)}
    recorder = Recorder(llm, knowing(known, lambda r: BLOCK))
    done = llm.generate(prompts, params)
    recorder.remove(llm)
    assert texts(done) == expected
    assert [len(c.token_ids) for c in done] == [1, 2, 4, 5, 9]
    assert {c.finish_reason for c in done} == {"length"}


@pytest.fixture
def resident() -> Callable[[], int]:
    """Reads this process's resident bytes."""
    statm, page = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")
    if not statm.exists():
        pytest.skip("no /proc here")

    def read() -> int:
        gc.collect()
        return int(statm.read_text().split()[1]) * page

    return read


def test_300_short_requests_leave_pages_free_and_memory_flat(
    llm: LLM, resident: Callable[[], int]
) -> None:
    generator = np.random.default_rng(5)

    def serve(count: int) -> None:
        prompts = [ids(int(n), seed) for seed, n in enumerate(generator.integers(1, 60, count))]
        params = [
            SamplingParams(
                max_tokens=int(generator.integers(1, 12)),
                temperature=float(i % 2),
                top_p=0.9 if i % 3 else 1.0,
                logprobs=1 if i % 5 == 0 else None,
                frequency_penalty=0.1 if i % 7 == 0 else 0.0,
            )
            for i in range(count)
        ]
        done = llm.generate(prompts, params)
        assert all(c.finish_reason in ("length", "stop") for c in done)

    serve(100)
    before = resident()
    serve(300)
    assert llm.pool.num_free == llm.pool.capacity
    assert resident() - before < 8 << 20
    assert llm.engine.batcher.idle
    assert len(llm.engine.batcher._slots) == llm.manifest.limits.max_batch_size


def test_a_step_that_fails_leaves_no_request_behind(llm: LLM) -> None:
    recorder = Recorder(llm, lambda request, tokens: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY)
    recorder.remove(llm)
    assert llm.engine.batcher.idle and llm.pool.num_free == llm.pool.capacity
    assert texts(llm.generate(PROMPTS[:1], GREEDY)) == plain(llm, PROMPTS[:1], GREEDY)


def test_statuses(llm: LLM) -> None:
    request = submit(llm, PROMPTS[0], max_tokens=2)
    assert request.status is Status.WAITING
    llm.engine.step()
    assert request.status is Status.RUNNING
    drain(llm)
    assert request.status is Status.FINISHED
