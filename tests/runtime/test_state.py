"""Per-slot state: a request that joins finds nothing of the one before it."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.runtime.kv_cache import BLANK_PAGE
from dspark_trt.runtime.request import Request, new_request
from dspark_trt.runtime.sampling_params import SamplingParams
from dspark_trt.runtime.state import StepState

VOCAB = 8


def request(params: SamplingParams, *, output: tuple[int, ...] = ()) -> Request:
    made = new_request(
        request_id="r",
        prompt_ids=[3, 3, 5],
        params=params,
        vocab_size=VOCAB,
        max_prompt_len=10,
        max_seq_len=20,
        eos_token_ids=(),
    )
    made.output_ids.extend(output)
    return made


@pytest.fixture
def state() -> StepState:
    return StepState(slots=2, max_pages=3, vocab_size=VOCAB)


def test_parameters_are_those_of_the_request(state: StepState) -> None:
    params = SamplingParams(
        temperature=0.5, top_k=99, top_p=0.25, min_p=0.125, draft_temperature=2.0
    )
    state.join(1, request(params))
    row = {name: array[1].tolist() for name, array in state.arrays.items() if array.ndim == 1}
    assert row["temperature"] == 0.5 and row["draft_temperature"] == 2.0
    assert (row["top_k"], row["top_p"], row["min_p"]) == (VOCAB, 0.25, 0.125)  # k: at most all
    assert (row["repetition_penalty"], row["presence_penalty"], row["bias_on"]) == (1.0, 0.0, 0)


def test_a_fresh_cache_and_an_empty_page_table(state: StepState) -> None:
    state.arrays["kv_len"][0] = 9
    state.set_pages(0, [4, 5, 6])
    state.join(0, request(SamplingParams()))
    assert state.arrays["kv_len"][0] == 0
    assert state.arrays["page_table"][0].tolist() == [BLANK_PAGE] * 3
    state.set_pages(0, [2])
    assert state.arrays["page_table"][0].tolist() == [2, BLANK_PAGE, BLANK_PAGE]


def test_counts_of_prompt_and_of_what_was_there_before_a_preemption(state: StepState) -> None:
    state.join(0, request(SamplingParams(frequency_penalty=1.0), output=(5, 6, 5)))
    assert state.arrays["prompt_counts"][0].tolist() == [0, 0, 0, 2, 0, 1, 0, 0]
    assert state.arrays["output_counts"][0].tolist() == [0, 0, 0, 0, 0, 2, 1, 0]
    assert state.arrays["last_token"][0] == 5


def test_counts_of_the_last_request_are_gone(state: StepState) -> None:
    params = SamplingParams(repetition_penalty=2.0)
    state.join(0, request(params))
    state.arrays["output_counts"][0] += 7  # as the verify graph counts
    state.join(0, request(params))
    assert not state.arrays["output_counts"][0].any()


def test_a_bias_goes_with_its_request(state: StepState) -> None:
    """Also where the next request has none: a batch mate's bias has every row added."""
    state.join(0, request(SamplingParams(logit_bias={2: 5.0, 3: -1.0})))
    assert state.arrays["bias"][0].tolist() == [0, 0, 5, -1, 0, 0, 0, 0]
    state.join(0, request(SamplingParams()))
    assert state.arrays["bias_on"][0] == 0
    assert not state.arrays["bias"][0].any()
    state.join(0, request(SamplingParams(logit_bias={4: 1.0})))
    assert np.flatnonzero(state.arrays["bias"][0]).tolist() == [4]
