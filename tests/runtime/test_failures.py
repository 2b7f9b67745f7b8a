"""A step that fails or is interrupted: its requests end with an error, nobody gets a wrong text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_driver import GREEDY, PROMPTS, audit, plain, submit, texts

from dspark_trt.runtime.executor_onnxruntime import Verdict
from dspark_trt.runtime.llm import LLM, Delta, SamplingParams
from dspark_trt.runtime.request import Request


@contextmanager
def failing_verify(llm: LLM, nth: int, when: str, error: type[BaseException]) -> Iterator[None]:
    """The `nth` verify step from here on raises, before or after the graph has run."""
    original, calls = llm.executor.verify, 0

    def verify(*args: Any, **kwargs: Any) -> Verdict:
        nonlocal calls
        calls += 1
        if calls == nth and when == "before":
            raise error("injected")
        verdict = original(*args, **kwargs)
        if calls == nth and when == "after":
            raise error("injected")
        return verdict

    llm.executor.verify = verify  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm.executor.verify


def check_clean(llm: LLM, expected: list[list[int]]) -> None:
    """Nothing is left, the blank page is zero, and the next texts are right."""
    assert llm.engine.batcher.idle and llm.pool.num_free == llm.pool.capacity
    assert len(llm.engine.batcher._slots) == llm.manifest.limits.max_batch_size
    assert not any(pages[0].any() for pages in llm.executor._pages.values())
    assert texts(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stream_beside_a_failing_generate_is_right_or_ends_with_an_error(
    llm: LLM, when: str, error: type[BaseException]
) -> None:
    expected = plain(llm, PROMPTS, GREEDY)
    reasons = set()
    for nth in range(1, 9):
        stream = llm.stream(PROMPTS[0], GREEDY)
        deltas: list[Delta] = [next(stream), next(stream)]
        with failing_verify(llm, nth, when, error), pytest.raises(error, match="injected"):
            llm.generate(PROMPTS[1:4], SamplingParams(max_tokens=40, ignore_eos=True))
        audit(llm)
        deltas += stream
        got = [token for delta in deltas for token in delta.token_ids]
        last = deltas[-1]
        reasons.add(last.finish_reason)
        assert last.completion is not None
        assert last.completion.finish_reason == last.finish_reason in ("length", "error")
        assert got == last.completion.token_ids == expected[0][: len(got)]
        assert "".join(d.text for d in deltas) == last.completion.text == llm.tokenizer.decode(got)
        assert (len(got) == GREEDY.max_tokens) == (last.finish_reason == "length")
        assert 1 + sum(last.completion.accepted_lengths) == len(got)
    assert reasons == {"length", "error"}  # untouched by a prefill step that fails
    check_clean(llm, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_generate_that_fails_at_any_step_leaves_nothing(llm: LLM, when: str) -> None:
    expected = plain(llm, PROMPTS, GREEDY)
    for nth in range(1, 14, 3):
        with failing_verify(llm, nth, when, RuntimeError), pytest.raises(RuntimeError):
            llm.generate(PROMPTS, GREEDY)
        check_clean(llm, expected)


def test_a_stream_that_fails_in_its_own_step_raises(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    with failing_verify(llm, 1, "after", RuntimeError), pytest.raises(RuntimeError):
        next(stream)
    assert list(stream) == []
    check_clean(llm, plain(llm, PROMPTS, GREEDY))


def test_a_failure_between_two_commits_ends_both_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(llm, PROMPTS, GREEDY)
    requests = [submit(llm, p, max_tokens=40, ignore_eos=True) for p in PROMPTS[:3]]
    for _ in range(3):
        llm.engine.step()
    original = Request.commit

    def commit(request: Request, *args: Any) -> int:
        if request is requests[1]:
            raise KeyboardInterrupt
        return original(request, *args)

    monkeypatch.setattr(Request, "commit", commit)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    monkeypatch.undo()
    for request, text in zip(requests, expected):
        assert request.finish_reason == "error"
        assert request.output_ids == text[: len(request.output_ids)]
    check_clean(llm, expected)


def test_a_failure_while_slots_are_filled_takes_those_that_joined(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that joined without a chunk of its own, whose slot would never be filled."""
    expected = plain(llm, PROMPTS, GREEDY)
    requests = [submit(llm, PROMPTS[3], max_tokens=9) for _ in range(4)]  # 160 rows, 64 at once
    monkeypatch.setattr(llm.executor.state, "set_pages", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.engine.step()
    monkeypatch.undo()
    assert [r.finish_reason for r in requests] == ["error"] * 4
    check_clean(llm, expected)


def test_a_failed_scheduling_loses_no_request_and_no_page(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(llm, PROMPTS, GREEDY)
    request = submit(llm, PROMPTS[0], max_tokens=9)
    monkeypatch.setattr(llm.pool, "grow", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.engine.step()
    monkeypatch.undo()
    assert request.finish_reason == "error"
    check_clean(llm, expected)


def test_one_request_that_cannot_be_finished_does_not_keep_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(llm, PROMPTS, GREEDY)
    requests = [submit(llm, p, max_tokens=9, stop=["\x00"]) for p in PROMPTS[:3]]
    assert requests[1].text_stream is not None
    monkeypatch.setattr(requests[1], "text_stream", object())
    with pytest.raises(AttributeError):  # in commit, and again in finish
        llm.engine.step()
    assert [r.finish_reason for r in requests] == ["error"] * 3
    check_clean(llm, expected)
