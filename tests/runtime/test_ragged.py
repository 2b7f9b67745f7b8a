"""The packed layout of a step: which rows there are, and which of them ask for logits."""

from __future__ import annotations

import numpy as np

from dspark_trt.runtime.ragged import Chunk, StepLayout, pack_step


def arrays(layout: StepLayout) -> dict[str, list[int]]:
    names = ("tokens_in", "slots", "chunk_lens", "chunk_rows", "logit_rows")
    return {name: getattr(layout, name).tolist() for name in names}


def test_chunks_come_first_then_decoding_rows() -> None:
    chunks = [
        Chunk(slot=3, token_ids=[7, 8, 9], emits=False),
        Chunk(slot=1, token_ids=[5], emits=True),
    ]
    layout = pack_step(chunks, [0, 2], budget=3)
    assert arrays(layout) == {
        "tokens_in": [7, 8, 9, 5, 0, 0, 0, 0, 0],  # 4 chunk rows, 2 anchors, 3 drafts
        "slots": [3, 1, 0, 2],
        "chunk_lens": [3, 1],
        "chunk_rows": [-1, 0],
        "logit_rows": [3, 4, 5, 6, 7, 8],
    }
    assert layout.num_chunks == 2


def test_context_logits_ask_for_every_row() -> None:
    chunks = [
        Chunk(slot=0, token_ids=[4, 5], emits=False, all_logits=True),
        Chunk(slot=1, token_ids=[6, 7, 8], emits=True),
        Chunk(slot=2, token_ids=[9, 9], emits=True, all_logits=True),
    ]
    layout = pack_step(chunks, [], budget=0)
    assert layout.logit_rows.tolist() == [0, 1, 4, 5, 6]
    assert layout.chunk_rows.tolist() == [-1, 2, 4]


def test_a_step_nobody_asks_of_still_has_one_row_of_logits() -> None:
    chunks = [Chunk(slot=0, token_ids=[4, 5, 6], emits=False)]
    layout = pack_step(chunks, [], budget=0)
    assert layout.logit_rows.tolist() == [2]
    assert layout.chunk_rows.tolist() == [-1]


def test_decoding_alone() -> None:
    layout = pack_step([], [2, 0, 1], budget=0)
    assert layout.tokens_in.tolist() == [0, 0, 0]
    assert layout.logit_rows.tolist() == [0, 1, 2]
    assert layout.num_chunks == 0


def test_everything_is_int32() -> None:
    layout = pack_step([], [0], budget=4)
    for name in StepLayout.__slots__:
        assert getattr(layout, name).dtype == np.int32, name
