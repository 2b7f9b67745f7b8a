"""Packing, anchors, and the labels of blocks."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_case import SMALL, random_corpus

from dspark_trt.tools.train.batches import (
    Batch,
    RowPlan,
    choose_anchors,
    make_batch,
    prefetched,
    step_data,
)
from dspark_trt.tools.train.config import TrainConfig
from dspark_trt.tools.train.packing import fair_shares, pack

CONFIG = TrainConfig(**SMALL)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60))
def test_rows_hold_every_document_once_and_are_not_overfull(lengths: list[int]) -> None:
    rows = pack(lengths, range(len(lengths)), 48)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(min(lengths[i], 48) for i in row) <= 48


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 64))
def test_shares_are_max_min_fair(counts: list[int], capacity: int) -> None:
    shares = fair_shares(counts, capacity)
    assert sum(shares) == min(capacity, sum(counts))
    assert all(0 <= s <= c for s, c in zip(shares, counts))
    short = [s for s, c in zip(shares, counts) if s < c]
    if short:  # nobody who gave way has less than another one, but for the remainder
        assert max(shares) <= min(short) + 1


def blocks(batch: Batch, config: TrainConfig) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(row, anchor) -> its counted (k from 1, label)."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for slot, label, weight in zip(
        batch.slot.tolist(), batch.label.tolist(), batch.weight.tolist()
    ):
        if not weight:
            continue
        block, k = divmod(slot, config.block_size)
        row, column = divmod(block, config.anchors)
        assert weight == pytest.approx(math.exp(-k / config.decay))
        found.setdefault((row, int(batch.anchors[row, column])), []).append((k + 1, label))
    return found


def test_a_slot_predicts_the_token_after_the_ones_before_it(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, 50, [12, 9, 30, 20])
    config = dataclasses.replace(CONFIG, anchors=48)
    rows = [[0, 2], [1, 3]]
    anchors = [choose_anchors(corpus, row, 0, config) for row in rows]
    batch = make_batch(corpus, rows, anchors, config)
    found = blocks(batch, config)
    expected = {}
    for b, row in enumerate(rows):
        at = 0
        for index in row:
            text = corpus.document(index)
            assert batch.tokens[b, at : at + len(text)].tolist() == text.tolist()
            for anchor in range(3, len(text) - 1):  # itself and the next one are of the answer
                reach = min(config.block_size, len(text) - 1 - anchor)
                labels = [(k, int(text[anchor + k])) for k in range(1, reach + 1)]
                expected[b, at + anchor] = labels
            at += len(text)
    assert found == expected
    flat = batch.tokens.reshape(-1)
    counted = batch.weight > 0
    assert (flat[batch.source + 1] == batch.label)[counted].all()


def test_an_answer_of_one_token_and_its_end_is_trained(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, 50, [5])  # 3 of the prompt, one of the answer, its end
    anchors = [choose_anchors(corpus, [0], 0, CONFIG)]
    batch = make_batch(corpus, [[0]], anchors, CONFIG)
    assert blocks(batch, CONFIG) == {(0, 3): [(1, int(corpus.document(0)[4]))]}


def test_a_short_document_gets_all_anchors_whatever_is_packed_with_it(tmp_path: Path) -> None:
    chosen = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        corpus = random_corpus(folder, 50, [9, 39], seed=seed)
        chosen.append(choose_anchors(corpus, [0, 1], 0, CONFIG))
        assert chosen[-1][0].tolist() == [3, 4, 5, 6, 7]
        assert len(chosen[-1][1]) == CONFIG.anchors - 5
    assert chosen[0][1].tolist() != chosen[1][1].tolist()  # drawn by the document's own hash


def test_anchors_are_drawn_anew_each_epoch_and_alike_each_time(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, 50, [40])
    first, again, next_epoch = (choose_anchors(corpus, [0], e, CONFIG)[0] for e in (0, 0, 1))
    assert first.tolist() == again.tolist() != next_epoch.tolist()


def test_processes_share_a_step_without_overlap(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, 50, [30] * 9)
    whole = step_data(corpus, RowPlan(corpus, CONFIG), CONFIG, at=(0, 6), part=(0, 1))
    parts = [
        step_data(corpus, RowPlan(corpus, CONFIG), CONFIG, at=(0, 6), part=(i, 2)) for i in (0, 1)
    ]
    assert whole.weight == pytest.approx(sum(part.weight for part in parts))
    assert (whole.epoch, whole.row) == (1, 1) == (parts[1].epoch, parts[1].row)
    joined = [row for pair in zip(*(p.batches[0].tokens.tolist() for p in parts)) for row in pair]
    assert joined == whole.batches[0].tokens.tolist()


def test_steps_made_ahead_are_those_made_on_demand(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, 50, [30] * 9)
    plan = RowPlan(corpus, CONFIG)
    steps = prefetched(lambda at: step_data(corpus, plan, CONFIG, at=at, part=(0, 1)), (0, 0))
    seen = [next(steps) for _ in range(4)]
    steps.close()  # type: ignore[attr-defined]
    at = (0, 0)
    for step in seen:
        expected = step_data(corpus, RowPlan(corpus, CONFIG), CONFIG, at=at, part=(0, 1))
        assert (step.epoch, step.row) == (expected.epoch, expected.row)
        assert np.array_equal(step.batches[0].tokens, expected.batches[0].tokens)
        at = (step.epoch, step.row)


def test_an_error_of_the_thread_is_raised_where_the_steps_are_used() -> None:
    def fail(at: tuple[int, int]) -> None:
        raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        next(prefetched(fail, (0, 0)))  # type: ignore[arg-type]
