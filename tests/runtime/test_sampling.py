"""Philox against published answers, streams that never meet, and bans at the right rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.request import Request, new_request
from dspark_trt.runtime.sampling import (
    BadWords,
    RowEdits,
    draw_uniforms,
    penalty_counts,
    philox4x32,
    philox_key,
    row_edits,
)
from dspark_trt.runtime.sampling_params import SamplingParams
from dspark_trt.runtime.tokenizer import Tokenizer

# Random123's known answers for Philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def request(
    output: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (1,),
    eos: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    vocab: int = 100,
    **params: Any,
) -> Request:
    """A running request that has generated `output`."""
    made = new_request(
        request_id="r",
        prompt_ids=prompt,
        params=SamplingParams(**params),
        vocab_size=vocab,
        max_prompt_len=64,
        max_seq_len=128,
        tokenizer=tokenizer,
        eos_token_ids=eos,
    )
    made.output_ids.extend(output)
    return made


def triples(edits: RowEdits) -> list[tuple[int, int, int]]:
    assert edits.seq.dtype == edits.k.dtype == edits.id.dtype == np.int64
    assert edits.value.dtype == np.float32
    assert np.all(np.isneginf(edits.value))
    return list(zip(edits.seq.tolist(), edits.k.tolist(), edits.id.tolist()))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    words = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert tuple(words.tolist()) == answer


def test_uniforms_follow_their_definition() -> None:
    key, step, g = philox_key(3, [5, 6], 0), 9, 4
    drawn = draw_uniforms(np.array([key]), np.array([step]), g)

    def one(stream: int, k: int) -> float:
        words = philox4x32(
            np.array([step, stream, k, 0], np.uint64),
            np.array([int(key) & 0xFFFFFFFF, int(key) >> 32], np.uint64),
        )
        return (int(words[0]) >> 8) / 2**24

    assert drawn.draft[0].tolist() == [one(0, k) for k in range(1, g + 1)]
    assert drawn.accept[0].tolist() == [one(1, k) for k in range(1, g + 1)]
    assert drawn.extra[0].tolist() == [one(2, 0), one(3, 0)]


def test_no_number_is_used_twice() -> None:
    keys = np.array([philox_key(0, [i], 0) for i in range(16)])
    drawn = [draw_uniforms(keys, np.full(16, step), 7) for step in range(64)]
    numbers = np.concatenate([np.hstack([d.draft, d.accept, d.extra]).ravel() for d in drawn])
    # 16384 draws of 24 bits: about 8 equal pairs are expected by chance.
    assert len(np.unique(numbers)) > len(numbers) - 40


def test_uniforms_are_uniform_and_exact_in_float32() -> None:
    keys = np.array([philox_key(7, [i], 0) for i in range(256)])
    drawn = draw_uniforms(keys, np.arange(256), 7)
    for numbers, shape in (
        (drawn.draft, (256, 7)),
        (drawn.accept, (256, 7)),
        (drawn.extra, (256, 2)),
    ):
        assert numbers.shape == shape
        assert numbers.dtype == np.float32
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        scaled = numbers.astype(np.float64) * 2**24
        assert np.array_equal(scaled, np.floor(scaled))
    counts = np.bincount((drawn.draft.ravel() * 16).astype(int), minlength=16)
    expected = drawn.draft.size / 16
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-square, 15 degrees, 0.1 %


def test_a_row_does_not_depend_on_its_batch_or_its_block_size() -> None:
    keys = np.array([philox_key(0, [i], 0) for i in range(5)])
    steps = np.array([4, 0, 2, 9, 1])
    whole = draw_uniforms(keys, steps, 7)
    alone = draw_uniforms(keys[3:4], steps[3:4], 3)
    assert np.array_equal(alone.draft[0], whole.draft[3, :3])
    assert np.array_equal(alone.accept[0], whole.accept[3, :3])
    assert np.array_equal(alone.extra[0], whole.extra[3])


def test_a_step_without_drafts_still_has_its_bonus_number() -> None:
    drawn = draw_uniforms(np.array([philox_key(0, [1], 0)]), np.array([0]), 0)
    assert drawn.draft.shape == (1, 0)
    assert drawn.extra.shape == (1, 2)


def test_the_key_depends_on_seed_prompt_and_sequence() -> None:
    keys = {
        int(philox_key(seed, prompt, index))
        for seed in (0, 1, 2**64 - 1)
        for prompt in ([1], [1, 0], [2], [2**40])
        for index in (0, 1)
    }
    assert len(keys) == 24
    assert philox_key(0, [1, 2], 0) == philox_key(0, (1, 2), 0)


def test_no_edits_where_nobody_needs_them() -> None:
    edits = row_edits([request([3]), request()], np.zeros((2, 3), np.int64), 0)
    assert triples(edits) == []
    assert edits.value.shape == (0,)


def test_end_and_stop_ids_are_banned_before_min_tokens() -> None:
    waiting = request([4], eos=[2], stop_token_ids=[8], min_tokens=3)
    edits = row_edits([request(), waiting], np.full((2, 4), 5), 3)
    assert triples(edits) == [(4, 0, 2), (4, 0, 8), (4, 1, 2), (4, 1, 8)]
    assert triples(row_edits([waiting], None, 0)) == [(0, 0, 2), (0, 0, 8)]


def test_an_ignored_eos_is_not_banned() -> None:
    waiting = request(eos=[2], stop_token_ids=[8], min_tokens=1, ignore_eos=True)
    assert triples(row_edits([waiting], None, 0)) == [(0, 0, 8)]


def test_single_token_bad_words_are_banned_at_every_row() -> None:
    edits = row_edits([request(bad_words=[[9], [9], [4]])], np.array([[1, 2]]), 0)
    assert triples(edits) == [(0, k, id_) for k in range(3) for id_ in (4, 9)]


def test_a_bad_word_is_banned_where_its_beginning_stands() -> None:
    made = request([5], prompt=[3, 4], bad_words=[[4, 5, 6], [5, 7], [1, 2, 3, 4]])
    edits = row_edits([made], np.array([[1, 2, 3]]), 0)
    assert triples(edits) == [(0, 0, 6), (0, 0, 7), (0, 3, 4)]


def test_rows_beyond_the_scheduled_length_have_no_edits() -> None:
    made = [request(bad_words=[[9]]), request(bad_words=[[9]])]
    edits = row_edits(made, np.zeros((2, 3), np.int64), 0, lengths=np.array([0, 2]))
    assert triples(edits) == [(0, 0, 9), (1, 0, 9), (1, 1, 9), (1, 2, 9)]


IDS = st.lists(st.integers(0, 2), max_size=5)


@settings(max_examples=300, deadline=None)
@given(
    prompt=IDS.filter(len),
    output=IDS,
    drafts=IDS,
    words=st.lists(IDS.filter(len), min_size=1, max_size=4),
)
def test_bans_of_words_match_the_obvious_rule(
    prompt: list[int], output: list[int], drafts: list[int], words: list[list[int]]
) -> None:
    made = request(output, prompt=prompt, bad_words=words)
    wanted = set()
    for k in range(len(drafts) + 1):
        before = prompt + output + drafts[:k]
        for word in words:
            if len(word) == 1 or before[-(len(word) - 1) :] == word[:-1]:
                wanted.add((0, k, word[-1]))
    found = triples(row_edits([made], np.array([drafts], np.int64).reshape(1, -1), 0))
    assert found == sorted(wanted)


def test_words_as_text_are_banned_with_and_without_a_leading_space(smollm2: Tokenizer) -> None:
    made = request(bad_words=["dog", " cat"], tokenizer=smollm2, vocab=smollm2.vocab_size)
    wanted = [
        smollm2.encode(text, add_special_tokens=False) for text in ("dog", " dog", "cat", " cat")
    ]
    assert made.bad_words == BadWords.from_ids(wanted)


def test_counts_are_of_the_whole_vocabulary() -> None:
    assert penalty_counts([1, 3, 1], 5).tolist() == [0, 2, 0, 1, 0]
    assert penalty_counts([], 3).tolist() == [0, 0, 0]
    assert penalty_counts([], 3).dtype == np.int32
