"""Acceptance on held-out documents, by the rule of inference: slot k (1..G) is the k-th draft.

Blocks start at every anchor of a document, and the head sees the true tokens. Two measures:

  argmax    slot k is accepted if the argmaxes of draft and target agree, and those before it were
  sampled   slot k is accepted with chance 1 - TV, given that those before it were

Both give survival rates (rate of slot k being accepted, over blocks that reach it) and the accepted
length `1 + sum of the rates`, the bonus token included. On answers of temperature 0 the argmax is
that of serving up to the first miss; `served_length` then walks each document as serving does (from
anchor to the token after the accepted ones) and is the mean of what a step commits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark_trt.tools.train.batches import make_batch
from dspark_trt.tools.train.config import TrainConfig
from dspark_trt.tools.train.corpus import Corpus
from dspark_trt.tools.train.packing import pack
from dspark_trt.tools.train.step import DraftStep


def evaluation_rows(corpus: Corpus, config: TrainConfig) -> list[list[int]]:
    """The rows that are evaluated: the first `evaluation_rows` of a fixed order."""
    order = np.random.default_rng([config.seed, 0xE7A1]).permutation(len(corpus)).tolist()
    return pack(corpus.lengths.tolist(), order, config.row_tokens)[: config.evaluation_rows]


class Tally:
    """Per block: what each slot did. -1 or NaN where the block does not reach it."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._agree: list[np.ndarray] = []  # [n, G] bool
        self._chance: list[np.ndarray] = []  # [n, G]
        self._confidence: list[np.ndarray] = []  # [n, G] logits
        self._reach: list[np.ndarray] = []  # [n] slots that count
        self._document: list[np.ndarray] = []  # [n]
        self._anchor: list[np.ndarray] = []  # [n] from the document's start

    def add(
        self, step: DraftStep, corpus: Corpus, rows: list[list[int]], config: TrainConfig
    ) -> None:
        """Evaluate `rows` at every anchor, as many at a time as training has in a row."""
        lengths = np.minimum(corpus.lengths, config.row_tokens)
        answers = corpus.records["answer"]
        wanted = [[np.arange(answers[i], lengths[i] - 1) for i in row] for row in rows]
        for part in range(-(-config.row_tokens // config.anchors)):
            picks = [_slice(row, part * config.anchors, config.anchors) for row in wanted]
            if any(len(p) for row in picks for p in row):
                self._add_batch(step, corpus, rows, picks, config)

    def _add_batch(
        self,
        step: DraftStep,
        corpus: Corpus,
        rows: list[list[int]],
        picks: list[list[np.ndarray]],
        config: TrainConfig,
    ) -> None:
        batch = make_batch(corpus, rows, picks, config)
        terms = step(batch.to(step.target.device))
        count = int((batch.weight > 0).sum())
        slot = batch.slot[:count].numpy()
        shape = len(rows) * config.anchors, self._size

        def spread(values: torch.Tensor, fill: float) -> np.ndarray:
            full = np.full(shape, fill, np.float32)
            full.reshape(-1)[slot] = values[:count].detach().float().cpu().numpy()
            return full

        # Where the answer is a greedy one its own token is the argmax, without rounding.
        document, anchor, used = self._blocks(rows, picks, config)
        greedy = corpus.records["temperature"][document] == 0
        by_label = spread(terms.slots.draft_top == batch.label.to(terms.slots.draft_top.device), 0)
        by_top = spread(terms.slots.draft_top == terms.slots.target_top, 0)
        chance = spread(terms.slots.acceptance, np.nan)[used]
        self._agree.append(np.where(greedy[:, None], by_label[used], by_top[used]) > 0)
        self._chance.append(chance)
        self._reach.append((~np.isnan(chance)).sum(1))
        self._document.append(document)
        self._anchor.append(anchor)
        if terms.confidence is not None:
            self._confidence.append(spread(terms.confidence, np.nan)[used])

    @staticmethod
    def _blocks(
        rows: list[list[int]], picks: list[list[np.ndarray]], config: TrainConfig
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document, anchor and flat index of each used block."""
        documents, anchors, used = [], [], []
        for b, (row, chosen) in enumerate(zip(rows, picks)):
            at = b * config.anchors
            for index, pick in zip(row, chosen):
                documents.append(np.full(len(pick), index))
                anchors.append(pick)
                used.append(at + np.arange(len(pick)))
                at += len(pick)
        return tuple(map(np.concatenate, (documents, anchors, used)))  # type: ignore[return-value]

    def report(self, corpus: Corpus) -> dict[str, Any]:
        """The figures of a training log; NaN where nothing was measured."""
        agree, chance = np.concatenate(self._agree), np.concatenate(self._chance)
        reach, document = np.concatenate(self._reach), np.concatenate(self._document)
        anchor = np.concatenate(self._anchor)
        temperature = corpus.records["temperature"][document]
        counted = np.arange(self._size) < reach[:, None]
        kept = np.cumprod(agree & counted, axis=1)
        survival = np.cumprod(np.nan_to_num(chance), axis=1)
        greedy, warm = temperature <= 0, temperature != 0  # unknown temperatures count as both
        found: dict[str, Any] = {
            "blocks": len(reach),
            "argmax_rates": _rates(kept, counted, greedy),
            "sampled_rates": _rates(survival, counted, warm),
            "served_length": _served_length(kept, reach, document, anchor, temperature == 0),
        }
        found["argmax_length"] = 1 + float(np.nansum(found["argmax_rates"]))
        found["sampled_length"] = 1 + float(np.nansum(found["sampled_rates"]))
        if self._confidence:
            logits = np.concatenate(self._confidence)
            before = np.concatenate([np.ones((len(kept), 1)), kept[:, :-1]], axis=1) > 0
            known = before & counted & greedy[:, None]
            found["confidence_auc"] = area_under_curve(logits[known], agree[known])
        return found


def evaluate(step: DraftStep, corpus: Corpus, config: TrainConfig) -> dict[str, Any]:
    """Acceptance on `corpus`; `{"blocks": 0}` where it is empty."""
    rows = evaluation_rows(corpus, config)
    tally = Tally(config.block_size)
    size = config.micro_rows or config.rows
    training = step.training
    step.eval()
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        tally.add(step, corpus, part + [[]] * (size - len(part)), config)
    step.train(training)
    return tally.report(corpus) if tally._reach else {"blocks": 0}


def _slice(picks: list[np.ndarray], start: int, count: int) -> list[np.ndarray]:
    """Elements `start .. start + count` of the concatenation, still split by document."""
    parts, offset = [], 0
    for pick in picks:
        low, high = max(start - offset, 0), max(start + count - offset, 0)
        parts.append(pick[low:high])
        offset += len(pick)
    return parts


def _rates(alive: np.ndarray, counted: np.ndarray, chosen: np.ndarray) -> list[float]:
    """Mean of `alive` [n, G] by slot, over the chosen blocks that reach it."""
    rates = []
    for k in range(alive.shape[1]):
        part = counted[:, k] & chosen
        rates.append(round(float(alive[part, k].mean()), 4) if part.any() else float("nan"))
    return rates


def _served_length(
    kept: np.ndarray,
    reach: np.ndarray,
    document: np.ndarray,
    anchor: np.ndarray,
    greedy: np.ndarray,
) -> float:
    """Tokens a step commits when each greedy document is decoded as serving does."""
    tokens = steps = 0
    for index in np.unique(document[greedy]):
        where = np.flatnonzero(document == index)
        where = where[np.argsort(anchor[where])]
        # From the anchor, `accepted + 1` tokens are committed, but not beyond the answer's end.
        gains = np.minimum(kept[where].sum(1) + 1, anchor[where[-1]] + 1 - anchor[where])
        at = 0
        while at < len(where):
            tokens += int(gains[at])
            steps += 1
            at += int(gains[at])
    return tokens / steps if steps else float("nan")


def area_under_curve(score: np.ndarray, event: np.ndarray) -> float:
    """ROC-AUC: the chance that a block with the event has the higher score; ties count half."""
    positives = int(event.sum())
    negatives = len(event) - positives
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of each tie, from 1
    total = float(ranks[inverse][event].sum())
    return (total - positives * (positives + 1) / 2) / (positives * negatives)
