"""Admission, chunks, pages and preemption, driven without a model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.batcher import Batcher, ScheduledStep, context_ids, context_len
from dspark_trt.runtime.kv_cache import PagePool
from dspark_trt.runtime.request import Request, Status, new_request
from dspark_trt.runtime.sampling_params import RequestError, SamplingParams

VOCAB, SEQ = 50, 96


def request(prompt: int, max_tokens: int, name: str = "r") -> Request:
    return new_request(
        request_id=name,
        prompt_ids=[1 + i % 40 for i in range(prompt)],
        params=SamplingParams(max_tokens=max_tokens),
        vocab_size=VOCAB,
        max_prompt_len=SEQ - 1,
        max_seq_len=SEQ,
        eos_token_ids=(),
    )


def batcher(
    pages: int = 40, *, page_size: int = 8, slots: int = 4, chunk: int = 16, block: int = 3
) -> Batcher:
    pool = PagePool(pages + 1, page_size)
    return Batcher(pool, num_slots=slots, max_num_tokens=chunk, lookahead=2 * (block + 1))


def run(batcher: Batcher, step: ScheduledStep, gain: int = 1) -> None:
    """What the engine does with a step, every decoding request gaining up to `gain` tokens."""
    emitting = [c.request for c in step.chunks if c.emits]
    for chunk in step.chunks:
        chunk.request.kv_len = chunk.end
    for r in emitting:
        r.commit([7])
    for r in step.decode:
        count = min(gain, r.max_tokens - len(r.output_ids))
        r.kv_len += count
        r.commit([7] * count)
    for r in [*emitting, *step.decode]:
        if r.finished:
            batcher.release(r)


def audit(batcher: Batcher) -> None:
    """No page lost or shared, slots unique, waiting requests hold nothing."""
    held = [page for r in batcher.running for page in r.pages]
    assert len(set(held)) == len(held)
    assert batcher.pool.num_free + len(held) == batcher.pool.capacity
    slots = [r.slot for r in batcher.running]
    assert None not in slots and len(set(slots)) == len(slots)
    assert all(r.slot is None and not r.pages and r.kv_len == 0 for r in batcher.waiting)


def test_a_prompt_is_split_and_only_its_last_chunk_emits() -> None:
    b, r = batcher(chunk=16), request(40, 4)
    b.add(r)
    spans = []
    for _ in range(3):
        step = b.schedule()
        spans += [(c.start, c.end, c.emits) for c in step.chunks]
        assert step.decode == []
        run(b, step)
    assert spans == [(0, 16, False), (16, 32, False), (32, 40, True)]
    assert b.schedule().decode == [r]


def test_chunks_of_a_step_share_its_rows() -> None:
    b = batcher(chunk=16)
    requests = [request(10, 4, str(i)) for i in range(3)]
    for r in requests:
        b.add(r)
    step = b.schedule()
    assert [(c.request, c.start, c.end) for c in step.chunks] == [
        (requests[0], 0, 10),
        (requests[1], 0, 6),
    ]
    assert step.joined == requests
    run(b, step)
    step = b.schedule()
    assert [(c.request, c.start, c.end) for c in step.chunks] == [
        (requests[1], 6, 10),
        (requests[2], 0, 10),
    ]


def test_prefill_comes_before_decoding_unless_mixed() -> None:
    for mixed in (False, True):
        b = batcher()
        b.mixed = mixed
        first, second = request(4, 9), request(4, 9)
        b.add(first)
        run(b, b.schedule())
        b.add(second)
        step = b.schedule()
        assert [c.request for c in step.chunks] == [second]
        assert step.decode == ([first] if mixed else [])


def test_more_requests_than_slots_wait_in_order() -> None:
    b = batcher(slots=2)
    requests = [request(4, 2, str(i)) for i in range(4)]
    for r in requests:
        b.add(r)
    assert b.schedule().joined == requests[:2]
    assert list(b.waiting) == requests[2:]
    assert [r.status for r in requests] == [Status.RUNNING] * 2 + [Status.WAITING] * 2


def test_a_request_that_can_never_fit_is_refused() -> None:
    b = batcher(pages=4, page_size=8)
    b.add(request(20, 12))
    with pytest.raises(RequestError, match="need 5 KV pages of 8 tokens, the cache has 4"):
        b.add(request(20, 13))
    assert len(b.waiting) == 1


def test_a_finished_request_is_not_queued() -> None:
    b = batcher()
    b.add(request(4, 0))
    assert b.idle


def test_the_head_of_the_queue_is_never_overtaken() -> None:
    b = batcher(pages=6, page_size=8)
    running, large, small = request(20, 20), request(30, 10), request(1, 1)
    for r in (running, large, small):
        b.add(r)
    assert b.schedule().joined == [running]
    assert list(b.waiting) == [large, small]


def test_pages_reach_two_blocks_ahead_but_not_past_the_end() -> None:
    b, r = batcher(page_size=1, block=3), request(5, 6)
    b.add(r)
    run(b, b.schedule())
    assert len(r.pages) == 11  # 5 + 8 ahead would be 13, the request ends at 11
    b, r = batcher(page_size=1, block=3), request(5, 30)
    b.add(r)
    run(b, b.schedule())
    run(b, b.schedule(), gain=4)
    assert (r.kv_len, len(r.pages)) == (9, 13)
    assert b.schedule().grown == [r]
    assert len(r.pages) == 17


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    b = batcher(pages=12, page_size=4)
    requests = [request(8, 24, str(i)) for i in range(3)]
    for r in requests:
        b.add(r)
    while not b.preemptions:
        step = b.schedule()
        audit(b)
        run(b, step, gain=2)
        audit(b)
    oldest, middle, youngest = requests
    assert youngest.status is Status.WAITING and youngest.slot is None
    assert oldest in b.running
    assert list(b.waiting)[-1] is youngest
    kept = list(youngest.output_ids)
    while not youngest.finished:
        step = b.schedule()
        again = [c for c in step.chunks if c.request is youngest and kept]
        assert not any(c.emits for c in again)
        run(b, step, gain=2)
        audit(b)
    assert youngest.output_ids[: len(kept)] == kept
    assert oldest.finished and middle.finished


def test_context_to_compute_again_is_all_but_the_newest_token() -> None:
    r = request(5, 9)
    assert context_len(r) == 5
    r.commit([41])
    assert context_len(r) == 5
    r.commit([42, 43])
    assert context_len(r) == 7
    assert context_ids(r, 0, 7) == [*r.prompt_ids, 41, 42]
    assert context_ids(r, 3, 6) == [*r.prompt_ids[3:], 41]
    assert context_ids(r, 5, 7) == [41, 42]
    assert context_ids(r, 6, 7) == [42]
    assert context_ids(r, 1, 4) == r.prompt_ids[1:4]


def test_release_frees_waiting_and_running_alike() -> None:
    b = batcher(slots=1)
    running, waiting = request(4, 9), request(4, 9)
    b.add(running)
    b.add(waiting)
    b.schedule()
    b.release(waiting)
    assert b.idle is False
    b.release(running)
    assert b.idle and b.pool.num_free == b.pool.capacity
    b.release(running)  # already gone
    audit(b)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=9),
    pages=st.integers(10, 30),
    page_size=st.sampled_from([4, 8, 16]),
    slots=st.integers(1, 4),
    chunk=st.sampled_from([1, 7, 64]),
    block=st.integers(0, 7),
    mixed=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_load_ends_with_all_pages_free(
    *,
    sizes: list[tuple[int, int]],
    pages: int,
    page_size: int,
    slots: int,
    chunk: int,
    block: int,
    mixed: bool,
    seed: int,
) -> None:
    """Random accepted lengths and cancellations: audited after every step, rows fit their pages."""
    generator = np.random.default_rng(seed)
    b = batcher(pages, page_size=page_size, slots=slots, chunk=chunk, block=block)
    b.mixed = mixed
    requests = [request(prompt, out, str(i)) for i, (prompt, out) in enumerate(sizes)]
    fitting = [r for r in requests if b.pool.pages_for(len(r.prompt_ids) + r.max_tokens) <= pages]
    for r in fitting:
        b.add(r)
    for _ in range(20_000):
        if b.idle:
            break
        step = b.schedule()
        audit(b)
        assert not step.empty
        assert sum(c.end - c.start for c in step.chunks) <= chunk
        for c in step.chunks:
            assert c.end <= len(c.request.pages) * page_size
        for r in step.decode:
            room = min(block, r.max_tokens - len(r.output_ids) - 1)
            assert r.kv_len + 1 + room <= len(r.pages) * page_size
        run(b, step, gain=int(generator.integers(1, block + 2)))
        if generator.random() < 0.02 and b.running:
            victim = b.running[int(generator.integers(len(b.running)))]
            victim.finish("cancelled")
            b.release(victim)
        audit(b)
    assert b.idle and b.pool.num_free == b.pool.capacity
    assert all(r.finished for r in fitting)


def test_fewer_rows_than_requests_are_given_in_turn() -> None:
    b = batcher(chunk=3)
    requests = [request(1, 20, str(i)) for i in range(4)]
    for r in requests:
        b.add(r)
    while any(not r.output_ids for r in requests):
        run(b, b.schedule())
    turns = []
    for _ in range(4):
        step = b.schedule()
        assert step.rows == 3
        turns += [r.request_id for r in step.decode]
        run(b, step)
    assert turns == ["0", "1", "2", "3"] * 3


def test_chunks_leave_decoding_the_rows_that_are_left() -> None:
    b = batcher(chunk=5)
    b.mixed = True
    requests = [request(1, 9, str(i)) for i in range(3)]
    for r in requests:
        b.add(r)
    run(b, b.schedule())
    b.add(request(4, 9))
    step = b.schedule()
    assert (len(step.chunks), len(step.decode), step.rows) == (1, 1, 5)
