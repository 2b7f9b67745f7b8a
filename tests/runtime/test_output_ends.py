"""Where the output ends inside a block: text, ids, logprobs and counts end at the same token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from draft_recorder import Recorder, knowing
from engine_driver import BLOCK, PROMPTS, plain

from dspark_trt.runtime.budget import NoDraft, Static
from dspark_trt.runtime.llm import LLM, Completion, SamplingParams

PROMPT = PROMPTS[0]
COUNT = 40


@pytest.fixture(scope="module")
def greedy(shared_llm: LLM) -> list[int]:
    """The greedy text of PROMPT."""
    return plain(shared_llm, [PROMPT], SamplingParams(max_tokens=COUNT, ignore_eos=True))[0]


@pytest.fixture
def knows(llm: LLM, greedy: list[int]) -> Iterator[LLM]:
    """Every draft is right, so ends fall anywhere inside blocks of G + 1 tokens."""
    recorder = Recorder(llm, knowing({tuple(PROMPT): [*greedy, *[5] * BLOCK]}, lambda r: BLOCK))
    yield llm
    recorder.remove(llm)


def one(llm: LLM, **params: Any) -> Completion:
    settings: dict[str, Any] = {"max_tokens": COUNT, "logprobs": 1} | params
    return llm.generate(PROMPT, SamplingParams(**settings))[0]


def check_counts(llm: LLM, done: Completion, kept: int) -> None:
    """Everything is cut after `kept` tokens."""
    assert len(done.token_ids) == kept
    assert done.logprobs is not None and len(done.logprobs) == kept
    assert [p.token_id for p in done.logprobs] == done.token_ids
    assert sum(done.accepted_lengths) == max(kept - 1, 0)
    assert all(n >= 1 for n in done.accepted_lengths)
    assert done.text == llm.tokenizer.decode(done.token_ids)


def first(greedy: list[int], position: int) -> int:
    """Where the token at `position` first occurs."""
    return greedy.index(greedy[position])


@pytest.mark.parametrize("position", range(2 * (BLOCK + 1) + 1))
def test_stop_ids_inside_a_block(knows: LLM, greedy: list[int], position: int) -> None:
    at = first(greedy, position)
    done = one(knows, stop_token_ids=[greedy[position]])
    assert (done.token_ids, done.finish_reason) == (greedy[:at], "stop")
    check_counts(knows, done, at)
    kept = one(knows, stop_token_ids=[greedy[position]], include_stop=True)
    assert (kept.token_ids, kept.finish_reason) == (greedy[: at + 1], "stop")
    check_counts(knows, kept, at + 1)


@pytest.mark.parametrize("position", [0, 1, BLOCK, BLOCK + 1, BLOCK + 3])
def test_end_ids_are_neither_emitted_nor_counted(
    knows: LLM, greedy: list[int], position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = first(greedy, position)
    monkeypatch.setattr(knows, "eos_token_ids", (greedy[position], 3))
    for include in (False, True):
        done = one(knows, include_stop=include)
        assert (done.token_ids, done.finish_reason) == (greedy[:at], "stop")
        check_counts(knows, done, at)
    on = one(knows, ignore_eos=True)
    assert (on.token_ids, on.finish_reason) == (greedy, "length")


def test_max_tokens_within_the_block_of_an_end_id(knows: LLM, greedy: list[int]) -> None:
    at = next(i for i in range(2, 12) if first(greedy, i) == i)
    done = one(knows, stop_token_ids=[greedy[at]], max_tokens=at)
    assert (done.token_ids, done.finish_reason) == (greedy[:at], "length")


@pytest.mark.parametrize("least", [1, 3, BLOCK + 1, 9])
def test_min_tokens_bans_ends_row_by_row(
    llm: LLM, greedy: list[int], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end id is banned in exactly the rows before min_tokens, however they fall into blocks."""
    monkeypatch.setattr(llm, "eos_token_ids", (greedy[0],))
    params = {"min_tokens": least, "stop_token_ids": [greedy[1]]}
    llm.engine.policy = NoDraft()
    expected = one(llm, **params)
    llm.engine.policy = Static()
    llm.engine.policy = Static()
    assert len(expected.token_ids) >= least
    assert not set(expected.token_ids) & {greedy[0], greedy[1]}
    known = {tuple(PROMPT): [*expected.token_ids, *[5] * BLOCK]}
    for accepted in range(BLOCK + 1):
        recorder = Recorder(llm, knowing(known, lambda r, n=accepted: n))  # type: ignore[misc]
        done = one(llm, **params)
        recorder.remove(llm)
        assert (done.token_ids, done.finish_reason) == (
            expected.token_ids,
            expected.finish_reason,
        )


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start, length", [(0, 1), (3, 2), (5, 4), (4, 11), (12, 7)])
def test_stop_strings_across_tokens_and_steps(
    knows: LLM, greedy: list[int], start: int, length: int, include: bool
) -> None:
    whole = knows.tokenizer.decode(greedy)
    stop = whole[start : start + length]
    found = whole.index(stop)
    text = whole[: found + length] if include else whole[:found]
    results = []
    for policy in (knows.engine.policy, NoDraft()):
        knows.engine.policy = policy
        done = one(knows, stop=stop, include_stop=include)
        assert (done.text, done.finish_reason) == (text, "stop")
        assert done.token_ids == greedy[: len(done.token_ids)]
        assert sum(done.accepted_lengths) == max(len(done.token_ids) - 1, 0)
        assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
        decoded = knows.tokenizer.decode(done.token_ids)
        assert decoded.startswith(text)
        assert not knows.tokenizer.decode(done.token_ids[:-1]).startswith(text) or not text
        results.append(done.token_ids)
    assert results[0] == results[1]


def test_a_stream_holds_back_what_may_be_a_stop_string(knows: LLM, greedy: list[int]) -> None:
    whole = knows.tokenizer.decode(greedy)
    stop = whole[6:14]
    params = SamplingParams(max_tokens=COUNT, stop=[stop, "never there"])
    deltas = list(knows.stream(PROMPT, params))
    assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
    done = knows.generate(PROMPT, params)[0]
    assert [i for d in deltas for i in d.token_ids] == done.token_ids
    assert deltas[-1].finish_reason == "stop"


def test_of_several_stop_strings_the_first_complete_one_wins(knows: LLM, greedy: list[int]) -> None:
    whole = knows.tokenizer.decode(greedy)
    stops = [whole[9:12], whole[4:7], whole[15:17]]
    done = one(knows, stop=stops)
    assert done.text == whole[: min(whole.index(s) for s in stops)]
