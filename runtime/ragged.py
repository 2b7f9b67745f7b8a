"""The packed layout of one step: what the verify graph is told about rows and sequences.

C prefill chunks come first, then B decoding requests, then padding. Chunk rows are known here; a
decoding request's rows (its anchor and its verified drafts) are packed on the device, so a layout
needs only how many there are in all: N = chunk rows + B + K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt: consecutive tokens of one request."""

    slot: int
    token_ids: Sequence[int]
    emits: bool  # its last row gives the request's first token
    all_logits: bool = False  # every row's logits are asked for (context logits)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Inputs of the verify graph that depend on the batch's composition; int32."""

    # [N] tokens of the chunks, then 0
    tokens_in: np.ndarray
    # [C + B]
    slots: np.ndarray
    # [C] rows of each chunk
    chunk_lens: np.ndarray
    # [C] index among the M rows of logits of the chunk's last row; -1 = the prompt goes on
    chunk_rows: np.ndarray
    # [M] rows of N whose logits are computed
    logit_rows: np.ndarray

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_lens)


def pack_step(chunks: Sequence[Chunk], decode_slots: Sequence[int], budget: int) -> StepLayout:
    """The layout of a step with K = `budget` verified drafts in all."""
    lens = [len(chunk.token_ids) for chunk in chunks]
    first = sum(lens)  # row of the first decoding request
    tokens = np.zeros(first + len(decode_slots) + budget, np.int32)
    chunk_rows: list[int] = []
    asked: list[int] = []
    start = 0
    for chunk, length in zip(chunks, lens, strict=True):
        tokens[start : start + length] = chunk.token_ids
        if chunk.all_logits:
            asked += range(start, start + length)
        elif chunk.emits:
            asked.append(start + length - 1)
        chunk_rows.append(len(asked) - 1 if chunk.emits else -1)
        start += length
    if not asked and not decode_slots:
        asked.append(start - 1)  # nobody reads it: the graph has one row of logits at least
    rows = np.concatenate(
        [np.array(asked, np.int32), np.arange(first, len(tokens), dtype=np.int32)]
    )
    slots = [chunk.slot for chunk in chunks] + list(decode_slots)
    return StepLayout(
        tokens_in=tokens,
        slots=np.array(slots, np.int32),
        chunk_lens=np.array(lens, np.int32),
        chunk_rows=np.array(chunk_rows, np.int32),
        logit_rows=rows,
    )
