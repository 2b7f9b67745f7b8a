"""Confidence logits to probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.runtime.confidence import probabilities

ONES = np.ones(3, np.float32)


def test_sigmoid_of_the_tempered_logit() -> None:
    logits = np.array([[0.0, 2.0, -2.0]], np.float32)
    c = probabilities(logits, np.array([1.0, 2.0, 0.5], np.float32))
    assert c.dtype == np.float64
    np.testing.assert_allclose(c, [[0.5, 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(4))]])


def test_without_a_head_everything_is_certain() -> None:
    logits = np.full((2, 3), np.inf, np.float32)
    assert probabilities(logits, ONES).tolist() == [[1.0] * 3] * 2


def test_what_is_not_a_number_counts_as_nothing() -> None:
    logits = np.array([[np.nan, -np.inf, 1e30]], np.float32)
    assert probabilities(logits, ONES).tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.filterwarnings("error")
def test_extreme_logits_warn_of_nothing() -> None:
    probabilities(np.array([[-1e30, 1e30, np.inf]], np.float32), ONES)
