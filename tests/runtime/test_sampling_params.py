"""Every parameter has a bound, and every refusal names field, value, bound and what to do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dspark_trt.runtime.sampling_params import RequestError, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED_BY_FIELD: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, True, "3", None, NAN],
    "min_tokens": [-1, 129, False],
    "temperature": [-1, -0.1, NAN, INF, -INF, 1e-10, 1e10, "hot", True, None],
    "draft_temperature": [-1, NAN, INF, True],
    "top_k": [-1, 0.5, True],
    "top_p": [0, -0.1, 1.1, NAN, INF, False],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, NAN, INF],
    "presence_penalty": [NAN, INF, -INF, "1"],
    "frequency_penalty": [NAN, INF, True],
    "logit_bias": [{1: NAN}, {1: INF}, {1: -INF}, {-1: 1.0}, {"1": 1.0}, [1]],
    "bad_words": [[""], [[]], [[-1]], [[1.5]], 3, [None], ""],
    "stop": ["", ["a", ""], [1], 5, b"x", None],
    "stop_token_ids": [[-1], [True], 3, "a", [1.0]],
    "seed": [-1, 2**64, 1.0, True],
    "logprobs": [-1, 21, True, 2.0],
    "n": [0, -1, 257, True],
    "penalty_prompt": [1],
    "include_stop": [None],
    "ignore_eos": ["yes"],
}
REFUSED = [(field, value) for field, values in REFUSED_BY_FIELD.items() for value in values]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=[f"{f}={v!r}" for f, v in REFUSED])
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field)
    assert " must be " in message
    assert ", got " in message
    assert ": " in message.split(", got ")[1]


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("top_p", [0, 0.0, -1, 1.5, NAN], "top_p must be a number in (0, 1], got "),
        ("temperature", [-1, 1e-10, 1e10, NAN], "temperature must be 0 or a number in [1e-09, "),
        ("n", [0, 257], "n must be an integer in [1, 256], got "),
    ],
)
def test_a_field_has_one_bound_whatever_is_wrong(field: str, values: list[Any], words: str) -> None:
    advice = set()
    for value in values:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert str(caught.value).startswith(words)
        advice.add(str(caught.value).split(": ")[1])
    assert len(advice) == 1


ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 1e-9},
    {"temperature": 1e9},
    {"temperature": 1, "draft_temperature": 0},
    {"draft_temperature": 0.0},
    {"top_k": 9999999},
    {"top_p": 1e-300},
    {"max_tokens": 0},
    {"min_tokens": 128},
    {"seed": 2**64 - 1},
    {"logprobs": 0},
    {"n": 256},
    {"logit_bias": {7: -100, 9: np.float32(1)}},
    {"stop_token_ids": np.array([1, 2])},
    {"max_tokens": np.int64(3), "temperature": np.float32(0.5)},
]


@pytest.mark.parametrize("values", ACCEPTED, ids=str)
def test_values_at_the_bounds_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_the_draft_temperature_follows_the_temperature_unless_given() -> None:
    assert SamplingParams(temperature=0.7).law_of_drafts == 0.7
    assert SamplingParams(temperature=0.7, draft_temperature=0.0).law_of_drafts == 0.0
    assert SamplingParams().law_of_drafts == 0.0
    with pytest.raises(RequestError, match="draft_temperature must be 0 or None at temperature 0"):
        SamplingParams(draft_temperature=0.5)


def test_lists_are_taken_as_one_or_many_and_frozen() -> None:
    bad: list[Any] = ["x", [1, 2]]
    params = SamplingParams(stop="END", bad_words=bad, stop_token_ids=[5])
    bad.append("y")
    assert params.stop == ("END",)
    assert params.bad_words == ("x", (1, 2))
    assert params.stop_token_ids == (5,)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]


def test_the_smallest_nucleus_survives_float32() -> None:
    assert np.float32(SamplingParams(top_p=1e-300).top_p) > 0


@pytest.mark.parametrize(
    "values", [{"logit_bias": {10: 1.0}}, {"stop_token_ids": [10]}, {"bad_words": [[1, 10]]}]
)
def test_ids_outside_the_vocabulary_are_refused(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    params.check_vocabulary(11)
    with pytest.raises(RequestError, match=rf"{next(iter(values))} must be ids below 10, got 10"):
        params.check_vocabulary(10)
