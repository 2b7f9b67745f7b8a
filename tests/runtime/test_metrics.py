"""Counters: sums that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dspark_trt.runtime.metrics import Metrics


def test_verification_is_counted_by_position() -> None:
    metrics = Metrics(3)
    lengths, gained = np.array([3, 1, 0]), np.array([2, 2, 1])
    metrics.count_verification(lengths, gained, drafted=True)
    assert metrics.verified_by_position.tolist() == [2, 1, 1]
    assert metrics.accepted_by_position.tolist() == [2, 0, 0]
    assert (metrics.drafted, metrics.verified) == (9, 4)
    assert (metrics.requests_steps, metrics.decode_tokens) == (3, 5)
    assert metrics.mean_accepted_length == pytest.approx(5 / 3)


def test_steps_without_drafts_count_their_tokens_only() -> None:
    metrics = Metrics(2)
    metrics.count_verification(np.zeros(2, int), np.ones(2, int), drafted=False)
    assert (metrics.drafted, metrics.verified, metrics.decode_tokens) == (0, 0, 2)
    assert metrics.verified_by_position.tolist() == [0, 0]
    assert metrics.mean_accepted_length == 1.0


def test_nothing_was_done_yet() -> None:
    assert Metrics(0).mean_accepted_length == 0.0
    assert Metrics(4).verified_by_position.tolist() == [0] * 4


def test_reset_clears_everything() -> None:
    metrics = Metrics(2)
    metrics.count_verification(np.array([2]), np.array([3]), drafted=True)
    metrics.steps, metrics.decode_seconds = 4, 1.5
    metrics.reset()
    assert metrics.block_size == 2
    assert (metrics.steps, metrics.decode_seconds, metrics.decode_tokens) == (0, 0.0, 0)
    assert metrics.accepted_by_position.tolist() == [0, 0]


def test_host_time_is_what_the_graphs_did_not_take() -> None:
    metrics = Metrics(2, decode_seconds=2.0, draft_seconds=0.5, verify_seconds=1.25)
    assert metrics.host_seconds == pytest.approx(0.25)
