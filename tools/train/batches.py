"""Batches: packed rows, the anchors sampled in them, and every label and weight of their blocks.

An anchor is a token of an answer whose next token is of the answer too. Slot k (1..G) of its block
predicts the token at anchor + k, from the target's law at anchor + k - 1, while that token is still
in the answer: the positions of a block that count are a prefix of it. Which anchors a document gets
depends on (seed, epoch) and the document alone, never on its neighbours, except that a full row
shares its anchors fairly.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dspark_trt.tools.train.config import TrainConfig
from dspark_trt.tools.train.corpus import Corpus
from dspark_trt.tools.train.packing import fair_shares, pack

PREFETCH = 3  # steps made ahead
PAD_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Flat indices are into [B * T] positions or [B * A * G] slots."""

    tokens: Tensor  # [B, T] int64
    document: Tensor  # [B, T] int32; PAD_DOCUMENT behind the last one
    positions: Tensor  # [B, T] int64, from 0 in each document
    anchors: Tensor  # [B, A] int64, index in the row, rising; unused ones are 0
    # M counted slots, then fill-up with weight 0.
    slot: Tensor  # [M] int64, flat slot
    source: Tensor  # [M] int64, flat position whose target law it predicts (anchor + k - 1)
    label: Tensor  # [M] int64, token at anchor + k
    weight: Tensor  # [M] float32, exp(-(k - 1) / decay)

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; copies to CUDA do not wait."""
        moved = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if device.type == "cuda":
                tensor = tensor.pin_memory()
            moved[field.name] = tensor.to(device, non_blocking=True)
        return Batch(**moved)


class RowPlan:
    """The rows of each epoch, in an order that (seed, epoch) settles."""

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        self._corpus, self._config = corpus, config
        self._epoch, self._rows = -1, [[0]]

    def rows(self, epoch: int) -> list[list[int]]:
        """The documents of each row of an epoch."""
        if epoch != self._epoch:
            order = np.random.default_rng([self._config.seed, epoch]).permutation(len(self._corpus))
            lengths = self._corpus.lengths.tolist()
            self._rows = pack(lengths, order.tolist(), self._config.row_tokens)
            self._epoch = epoch
        return self._rows

    def step_rows(self, epoch: int, row: int) -> tuple[list[tuple[int, list[int]]], int, int]:
        """Rows of the step that starts at (epoch, row), each with its epoch; the next start."""
        taken: list[tuple[int, list[int]]] = []
        while len(taken) < self._config.rows:
            rows = self.rows(epoch)
            part = rows[row : row + self._config.rows - len(taken)]
            taken.extend((epoch, documents) for documents in part)
            row += len(part)
            if row >= len(rows):
                epoch, row = epoch + 1, 0
        return taken, epoch, row


def choose_anchors(
    corpus: Corpus, documents: Sequence[int], epoch: int, config: TrainConfig
) -> list[np.ndarray]:
    """Sampled anchors of each document of a row, from its start, rising."""
    lengths = np.minimum(corpus.lengths[list(documents)], config.row_tokens)
    first = corpus.records["answer"][list(documents)]
    counts = np.maximum(lengths - 1 - first, 0).tolist()
    chosen = []
    shares = fair_shares(counts, config.anchors)
    for index, count, low, share in zip(documents, counts, first.tolist(), shares):
        if share == count:
            chosen.append(low + np.arange(count))
            continue
        draw = np.random.default_rng([config.seed, epoch, int(corpus.records["key"][index])])
        chosen.append(low + np.sort(draw.choice(count, share, replace=False)))
    return chosen


def make_batch(
    corpus: Corpus,
    rows: Sequence[Sequence[int]],  # documents of each row
    anchors: Sequence[Sequence[np.ndarray]],  # of each document of each row, from its start
    config: TrainConfig,
) -> Batch:
    """The batch of these rows; at most `config.anchors` anchors a row."""
    shape = (len(rows), config.row_tokens)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    document = np.full(shape, PAD_DOCUMENT, np.int32)
    anchor = np.zeros((len(rows), config.anchors), np.int64)
    reach = np.zeros((len(rows), config.anchors), np.int64)  # slots of the block that count
    for b, (documents, chosen) in enumerate(zip(rows, anchors)):
        at = used = 0
        for number, (index, picks) in enumerate(zip(documents, chosen)):
            text = corpus.document(index)[: config.row_tokens]
            end = at + len(text)
            tokens[b, at:end], document[b, at:end] = text, number
            positions[b, at:end] = np.arange(len(text))
            anchor[b, used : used + len(picks)] = at + picks
            reach[b, used : used + len(picks)] = len(text) - 1 - picks
            at, used = end, used + len(picks)
    arrays = _slots(tokens, anchor, reach, config)
    return Batch(*map(torch.from_numpy, (tokens, document, positions, anchor, *arrays)))


def _slots(
    tokens: np.ndarray, anchor: np.ndarray, reach: np.ndarray, config: TrainConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """slot, source, label and weight of the slots that count, filled up to whole chunks."""
    size, chunk = config.block_size, config.vocabulary_chunk
    b, a, k = np.nonzero(np.arange(size) < reach[..., None])  # k from 0
    source = b * tokens.shape[1] + anchor[b, a] + k
    slot = (b * anchor.shape[1] + a) * size + k
    label = tokens.reshape(-1)[source + 1]
    weight = np.exp(-k / config.decay).astype(np.float32)
    fill = (0, -len(slot) % chunk if len(slot) else chunk)
    return np.pad(slot, fill), np.pad(source, fill), np.pad(label, fill), np.pad(weight, fill)


@dataclass(frozen=True, slots=True)
class StepData:
    """What a process does in one step, and where the data stands after it."""

    batches: list[Batch]
    weight: float  # sum of the weights of the batches
    slots: int  # slots that count
    epoch: int
    row: int


def step_data(
    corpus: Corpus,
    plan: RowPlan,
    config: TrainConfig,
    *,
    at: tuple[int, int],
    part: tuple[int, int],
) -> StepData:
    """The batches of process `part[0]` of `part[1]` for the step that starts at (epoch, row)."""
    taken, epoch, row = plan.step_rows(*at)
    mine = taken[part[0] :: part[1]]
    size = config.micro_rows or len(mine)
    batches = []
    for start in range(0, len(mine), size):
        rows = mine[start : start + size]
        anchors = [choose_anchors(corpus, documents, e, config) for e, documents in rows]
        batches.append(make_batch(corpus, [documents for _, documents in rows], anchors, config))
    weight = sum(float(batch.weight.double().sum()) for batch in batches)
    slots = sum(int((batch.weight > 0).sum()) for batch in batches)
    return StepData(batches, weight, slots, epoch, row)


def prefetched(
    make: Callable[[tuple[int, int]], StepData], at: tuple[int, int]
) -> Iterator[StepData]:
    """Steps from `at` on, made by a thread of their own; its errors are raised here."""
    ready: queue.Queue[StepData | BaseException] = queue.Queue(PREFETCH)
    stopped = threading.Event()

    def put(item: StepData | BaseException) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.2)
            except queue.Full:
                continue
            break

    def work(at: tuple[int, int]) -> None:
        try:
            while not stopped.is_set():
                data = make(at)
                at = (data.epoch, data.row)
                put(data)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, args=(at,), daemon=True, name="batches")
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
