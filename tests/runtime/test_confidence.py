"""Confidence logits to probabilities and survival."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.runtime.confidence import probabilities, survival

ONES = np.ones(3, np.float32)


def test_sigmoid_of_the_tempered_logit() -> None:
    logits = np.array([[0.0, 2.0, -2.0]], np.float32)
    c = probabilities(logits, np.array([1.0, 2.0, 0.5], np.float32))
    assert c.dtype == np.float64
    np.testing.assert_allclose(c, [[0.5, 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(4))]])


def test_without_a_head_everything_survives() -> None:
    logits = np.full((2, 3), np.inf, np.float32)
    assert probabilities(logits, ONES).tolist() == [[1.0] * 3] * 2
    assert survival(logits, ONES).tolist() == [[1.0] * 3] * 2


def test_what_is_not_a_number_counts_as_nothing() -> None:
    logits = np.array([[np.nan, -np.inf, 1e30]], np.float32)
    assert probabilities(logits, ONES).tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.filterwarnings("error")
def test_extreme_logits_warn_of_nothing() -> None:
    probabilities(np.array([[-1e30, 1e30, np.inf]], np.float32), ONES)


def test_survival_is_the_running_product_and_never_rises() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    a = survival(logits, np.ones(7, np.float32))
    np.testing.assert_allclose(a[:, 2], probabilities(logits, np.ones(7))[:, :3].prod(axis=1))
    assert (np.diff(a, axis=1) <= 0).all()
