"""Committing steps: ids, text, logprobs and counts end at one place, however steps are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.request import Request, Status, TokenLogprobs, new_request
from dspark_trt.runtime.sampling import philox_key
from dspark_trt.runtime.sampling_params import RequestError, SamplingParams
from dspark_trt.runtime.tokenizer import Tokenizer

EOS = 7


def make(tokenizer: Tokenizer | None = None, *, max_seq_len: int = 64, **params: Any) -> Request:
    return new_request(
        request_id="r",
        prompt_ids=[0, 1],
        params=SamplingParams(**params),
        vocab_size=8,
        max_prompt_len=32,
        max_seq_len=max_seq_len,
        tokenizer=tokenizer,
        eos_token_ids=[EOS],
    )


def fed(request: Request, ids: Sequence[int], groups: Sequence[int] = (1,)) -> Request:
    """Commit prefill's token, then steps of the sizes in `groups` (repeated), until it finishes."""
    start, turn = 0, 0
    while start < len(ids) and not request.finished:
        size = 1 if start == 0 else groups[turn % len(groups)]
        turn += start > 0
        step = ids[start : start + size]
        given_logprobs = [TokenLogprobs(id_, -float(start + i)) for i, id_ in enumerate(step)]
        before = len(request.output_ids)
        kept = request.commit(step, given_logprobs if request.logprobs is not None else None)
        assert kept == max(len(request.output_ids) - before, 0)
        start += size
    return request


def check_counts(request: Request) -> None:
    """The equation of accepted_lengths, and logprobs that belong to their tokens."""
    if request.output_ids:
        assert 1 + sum(request.accepted_lengths) == len(request.output_ids)
    else:
        assert request.accepted_lengths == []
    assert all(length > 0 for length in request.accepted_lengths)
    if request.logprobs is not None:
        assert [entry.token_id for entry in request.logprobs] == request.output_ids
        assert [entry.logprob for entry in request.logprobs] == [
            -float(i) for i in range(len(request.output_ids))
        ]


def test_eos_inside_a_block_ends_the_output_unseen() -> None:
    request = fed(make(), [1, 2, EOS, 3, 4], [4])
    assert request.output_ids == [1, 2]
    assert (request.finish_reason, request.status) == ("stop", Status.FINISHED)
    assert request.accepted_lengths == [1]
    assert request.step_lengths_uncut == [4]


def test_eos_as_the_first_token_leaves_nothing() -> None:
    request = fed(make(), [EOS])
    assert request.output_ids == request.accepted_lengths == request.step_lengths_uncut == []
    assert request.finish_reason == "stop"


def test_a_step_that_keeps_nothing_has_no_entry() -> None:
    request = fed(make(), [1, 2, 3, EOS, 4], [2])
    assert request.output_ids == [1, 2, 3]
    assert request.accepted_lengths == [2]
    assert request.step_lengths_uncut == [2, 2]
    check_counts(request)


def test_an_ignored_eos_is_an_ordinary_token() -> None:
    request = fed(make(ignore_eos=True, max_tokens=4), [1, EOS, 2, EOS, 3], [3])
    assert request.output_ids == [1, EOS, 2, EOS]
    assert request.finish_reason == "length"


@pytest.mark.parametrize(("include", "output"), [(False, [1, 2]), (True, [1, 2, 3])])
def test_a_stop_id_is_emitted_only_with_include_stop(include: bool, output: list[int]) -> None:
    request = fed(make(stop_token_ids=[3], include_stop=include), [1, 2, 3, 4], [3])
    assert request.output_ids == output
    assert request.finish_reason == "stop"
    check_counts(request)


def test_an_end_id_is_never_emitted_even_as_a_stop_id() -> None:
    request = fed(make(stop_token_ids=[EOS], include_stop=True), [1, EOS])
    assert request.output_ids == [1]


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5])
def test_a_block_is_cut_to_the_room_left(max_tokens: int) -> None:
    request = fed(make(max_tokens=max_tokens), [1] * 20, [4])
    assert len(request.output_ids) == max_tokens
    assert request.finish_reason == "length"
    assert request.accepted_lengths == ([] if max_tokens == 1 else [max_tokens - 1])
    check_counts(request)


def test_no_tokens_asked_for_is_finished_at_birth() -> None:
    request = make(max_tokens=0)
    assert (request.status, request.finish_reason) == (Status.FINISHED, "length")
    assert make().status is Status.WAITING


def test_new_tokens_are_clamped_to_the_context() -> None:
    request = fed(make(max_tokens=100, max_seq_len=6), [1] * 20, [3])
    assert len(request.output_ids) == 4
    assert request.finish_reason == "length"


def test_a_stop_string_takes_back_tokens_of_earlier_steps(letters: Tokenizer) -> None:
    request = make(letters, stop="bbb", logprobs=0)
    fed(request, [0, 0, 1, 1, 1, 0], [2, 1, 2])
    assert request.output_ids == [0, 0]
    assert request.text(letters) == "aa"
    assert request.accepted_lengths == [1]
    assert request.step_lengths_uncut == [2, 1, 2]
    assert request.finish_reason == "stop"
    check_counts(request)


def test_a_stop_string_at_the_very_start_leaves_nothing(letters: Tokenizer) -> None:
    request = fed(make(letters, stop="ab"), [0, 1, 0], [1])
    assert request.output_ids == request.accepted_lengths == []
    assert request.text(letters) == ""


def test_a_stop_string_is_not_honoured_before_min_tokens(letters: Tokenizer) -> None:
    request = fed(make(letters, stop="a", min_tokens=2), [0, 0, 1, 0, 1], [4])
    assert request.output_ids == [0, 0, 1]
    assert request.finish_reason == "stop"


def test_prefill_gives_one_token_and_steps_have_ordinals() -> None:
    request = make()
    with pytest.raises(AssertionError):
        request.commit([1, 2])
    request.commit([1])
    assert (request.step, request.accepted_lengths) == (1, [])
    request.commit([1, 2])
    assert (request.step, request.accepted_lengths) == (2, [2])
    assert request.num_tokens == 5
    assert request.last_ids(4) == [1, 1, 1, 2]
    assert request.last_ids(2) == [1, 2]
    assert request.last_ids(9) == [0, 1, 1, 1, 2]
    assert request.last_ids(0) == []


def test_a_cancelled_request_keeps_what_it_has(letters: Tokenizer) -> None:
    request = make(letters, stop="bb")
    request.commit([0])
    request.commit([1])
    request.finish("cancelled")
    request.finish("length")
    assert request.finish_reason == "cancelled"
    assert request.text(letters) == "ab"
    with pytest.raises(AssertionError):
        request.commit([1])


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ids=st.lists(st.integers(0, 7), min_size=1, max_size=16),
    groups=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    params=st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 14), "include_stop": st.booleans()},
        optional={
            "stop": st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=2),
            "stop_token_ids": st.lists(st.integers(0, 6), max_size=2),
            "ignore_eos": st.booleans(),
            "logprobs": st.just(0),
        },
    ),
    min_tokens=st.integers(0, 3),
)
def test_the_outcome_does_not_depend_on_the_steps(
    letters: Tokenizer,
    ids: list[int],
    groups: list[int],
    params: dict[str, Any],
    min_tokens: int,
) -> None:
    values = {**params, "min_tokens": min(min_tokens, params["max_tokens"])}
    plain, grouped = (fed(make(letters, **values), ids, g) for g in ([1], groups))
    for request in (plain, grouped):
        request.finish("length")
        check_counts(request)
    assert grouped.output_ids == plain.output_ids
    assert grouped.finish_reason == plain.finish_reason
    assert grouped.text(letters) == plain.text(letters)
    assert len(plain.output_ids) <= values["max_tokens"]
    assert letters.decode(plain.output_ids).startswith(plain.text(letters))


def test_streamed_text_is_taken_once(letters: Tokenizer) -> None:
    request = new_request(
        request_id="r",
        prompt_ids=[0],
        params=SamplingParams(max_tokens=3),
        vocab_size=8,
        max_prompt_len=8,
        max_seq_len=16,
        tokenizer=letters,
        stream_text=True,
    )
    assert request.text_stream is not None
    taken = []
    for id_ in (0, 6, 1):
        request.commit([id_])
        taken.append(request.text_stream.take())
    assert taken == ["a", "b a", "b"]
    assert request.text_stream.released_tokens == 3


def test_lazy_text_equals_streamed_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Grüße 🦕, wie geht's?")
    texts = []
    for stream_text in (False, True):
        request = new_request(
            request_id="r",
            prompt_ids=[5],
            params=SamplingParams(max_tokens=len(ids) - 1),
            vocab_size=smollm2.vocab_size,
            max_prompt_len=8,
            max_seq_len=256,
            tokenizer=smollm2,
            stream_text=stream_text,
        )
        assert (request.text_stream is None) is not stream_text
        texts.append(fed(request, ids, [3]).text(smollm2))
    assert texts[0] == texts[1]


def prompt_error(prompt: Any, **changes: Any) -> str:
    values: dict[str, Any] = {"vocab_size": 8, "max_prompt_len": 4, "max_seq_len": 16, **changes}
    params = values.pop("params", SamplingParams())
    with pytest.raises(RequestError) as caught:
        new_request(request_id="r", prompt_ids=prompt, params=params, **values)
    return str(caught.value)


def test_bad_prompts_are_refused() -> None:
    assert prompt_error([]).startswith("prompt must be at least one token")
    message = prompt_error([1] * 5)
    assert message.startswith("Prompt length (5) exceeds maximum input length (4)")
    assert prompt_error([1, 8]).startswith("prompt_ids[1] must be in [0, 8), got 8")
    assert prompt_error([-1]).startswith("prompt_ids[0] must be in [0, 8), got -1")
    assert prompt_error([1.5]).startswith("prompt must be a flat list of integer ids")
    assert prompt_error([[1]]).startswith("prompt must be a flat list of integer ids")
    assert prompt_error([1, True]).startswith("prompt must be a flat list of integer ids")
    assert prompt_error([[1], [1, 2]]).startswith("prompt must be a flat list of integer ids")
    assert prompt_error([2**70]).startswith("prompt_ids[0] must be in [0, 8)")
    message = prompt_error([1] * 4, max_seq_len=4)
    assert message.startswith("Prompt length (4) exceeds maximum input length (3)")


def test_text_parameters_need_a_tokenizer() -> None:
    assert prompt_error([1], params=SamplingParams(stop="x")).startswith("stop must be empty")
    message = prompt_error([1], params=SamplingParams(bad_words=["x"]))
    assert message.startswith("bad_words must be token ids")


def test_every_sequence_of_a_prompt_has_its_own_key() -> None:
    keys = []
    for index in range(3):
        request = new_request(
            request_id=f"r{index}",
            prompt_ids=np.array([1, 2]).tolist(),
            params=SamplingParams(seed=5, n=3),
            vocab_size=8,
            max_prompt_len=4,
            max_seq_len=16,
            sequence_index=index,
        )
        assert request.key == philox_key(5, [1, 2], index)
        keys.append(int(request.key))
    assert len(set(keys)) == 3
