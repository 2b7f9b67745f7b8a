"""Random numbers and per-row logit edits of a step, made on the host.

Randomness. `u = Philox4x32-10(key, counter)`, word 0, top 24 bits over 2^24, so every `u` is in
`[0, 1)` and exact in float32. `key` = 64-bit hash of (seed, prompt ids, sequence index);
`counter` = (the request's step ordinal, stream, k, 0). Streams: draft and accept (k = 1..G),
recover and bonus (k = 0). A step ordinal belongs to one step of one request, so no (key, counter)
is used twice.

Edits. What cannot live in the per-slot state, since it depends on the position: end and stop ids
before `min_tokens`, and bad words. All are bans (-inf).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dspark_trt.runtime.request import Request

STREAM_DRAFT, STREAM_ACCEPT, STREAM_RECOVER, STREAM_BONUS = 0, 1, 2, 3

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)  # of counter words 0 and 2
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)  # added to the two key words each round
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_WEYL_BY_ROUND = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * _WEYL  # [rounds, 2]


@dataclass(frozen=True, slots=True)
class Uniforms:
    """The numbers a step of B requests consumes, float32 in [0, 1)."""

    # [B, G] column k - 1 draws x_k
    draft: np.ndarray
    # [B, G] column k - 1 judges x_k
    accept: np.ndarray
    # [B, 2] recover (after a rejection), bonus (after none)
    extra: np.ndarray


@dataclass(frozen=True, slots=True)
class RowEdits:
    """Q values to add to logits: `logits[row k of sequence seq, id] += value`."""

    # [Q] int64 each: index of the sequence in the step, position in the block, token id
    seq: np.ndarray
    k: np.ndarray
    id: np.ndarray
    # [Q] float32
    value: np.ndarray


_NOTHING = np.empty(0, np.int64)
NO_EDITS = RowEdits(_NOTHING, _NOTHING, _NOTHING, np.empty(0, np.float32))


@dataclass(frozen=True, slots=True)
class BadWords:
    """Words as token ids, sorted for the test at one position."""

    single: tuple[int, ...]  # banned everywhere
    by_previous: dict[int, tuple[tuple[int, ...], ...]]  # second-last id of a word -> the words
    window: int  # ids before a position that decide: longest word - 1

    @staticmethod
    def from_ids(words: Sequence[Sequence[int]]) -> BadWords | None:
        """None where there are no words."""
        if not words:
            return None
        unique = sorted({tuple(word) for word in words})
        by_previous: dict[int, tuple[tuple[int, ...], ...]] = {}
        for word in unique:
            if len(word) > 1:
                by_previous[word[-2]] = (*by_previous.get(word[-2], ()), word)
        single = tuple(word[0] for word in unique if len(word) == 1)
        return BadWords(single, by_previous, max(len(word) for word in unique) - 1)

    def banned_after(self, ids: Sequence[int], end: int) -> list[int]:
        """Multi-token words' last ids, where `ids[:end]` ends with all that comes before them."""
        if end == 0:
            return []
        return [
            word[-1]
            for word in self.by_previous.get(ids[end - 1], ())
            if end >= len(word) - 1 and tuple(ids[end - len(word) + 1 : end]) == word[:-1]
        ]


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox4x32-10 of `counter` [4, ...] and `key` [2, ...] (32-bit words, uint64): [4, ...]."""
    shape = np.broadcast_shapes(counter.shape[1:], key.shape[1:])
    column = (2,) + (1,) * len(shape)
    multipliers = _MULTIPLIERS.reshape(column)
    even = np.empty((2, *shape), np.uint64)  # words 0 and 2: multiplied
    odd = np.empty((2, *shape), np.uint64)  # words 1 and 3
    even[:], odd[:] = counter[0::2], counter[1::2]
    keys = (key + _WEYL_BY_ROUND.reshape(_ROUNDS, *column)) & _LOW32  # [rounds, 2, ...]
    product = np.empty_like(even)
    for round_key in keys:
        np.multiply(even, multipliers, out=product)
        np.right_shift(product[::-1], _SHIFT32, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, round_key, out=even)
        np.bitwise_and(product[::-1], _LOW32, out=odd)
    words = np.empty((4, *shape), np.uint64)
    words[0::2], words[1::2] = even, odd
    return words


def philox_key(seed: int, prompt_ids: Sequence[int], sequence_index: int) -> np.uint64:
    """The request's own key: clients that all send seed 0 still get streams of their own."""
    digest = hashlib.blake2b(digest_size=8, person=b"dspark-philox")
    digest.update(seed.to_bytes(8, "little") + sequence_index.to_bytes(8, "little"))
    digest.update(np.asarray(prompt_ids, dtype="<i8").tobytes())
    return np.uint64(int.from_bytes(digest.digest(), "little"))


@lru_cache(maxsize=16)
def _counters(block_size: int) -> np.ndarray:
    """Counter words 1, 2 of a request's draws, [2, 2 * G + 2]: draft, accept, recover, bonus."""
    positions = range(1, block_size + 1)
    draws = [(STREAM_DRAFT, k) for k in positions] + [(STREAM_ACCEPT, k) for k in positions]
    return np.array([*draws, (STREAM_RECOVER, 0), (STREAM_BONUS, 0)], np.uint64).T


def draw_uniforms(keys: np.ndarray, steps: np.ndarray, block_size: int) -> Uniforms:
    """All numbers of a step: `keys` [B] uint64, `steps` [B] step ordinals (0 = prefill's draw)."""
    batch, g = len(keys), block_size
    counter = np.zeros((4, batch, 2 * g + 2), np.uint64)
    counter[0] = np.asarray(steps, np.uint64)[:, None]
    counter[1:3] = _counters(g)[:, None, :]
    keys = np.asarray(keys, np.uint64)
    key = np.stack([keys & _LOW32, keys >> _SHIFT32])[:, :, None]  # [2, B, 1]
    top24 = (philox4x32(counter, key)[0] >> np.uint64(8)).astype(np.float32)
    uniforms = top24 * np.float32(2.0**-24)
    return Uniforms(uniforms[:, :g], uniforms[:, g : 2 * g], uniforms[:, 2 * g :])


def _banned_ids(request: Request, ids: Sequence[int], end: int, generated: int) -> set[int]:
    """Ids that the row after `ids[:end]` must not draw, `generated` tokens of output before it."""
    banned: set[int] = set()
    if generated < request.params.min_tokens:
        banned.update(request.end_ids)
    if request.bad_words is not None:
        banned.update(request.bad_words.single)
        banned.update(request.bad_words.banned_after(ids, end))
    return banned


def row_edits(
    requests: Sequence[Request],
    draft_tokens: np.ndarray | None,
    first_seq: int,
    *,
    lengths: np.ndarray | None = None,
) -> RowEdits:
    """Bans of a step's rows; sequence `first_seq + i` is `requests[i]`.

    draft_tokens: [B, G] x_1..x_G, or None where nothing is drafted (row 0 alone). Row k counts
        x_1..x_k as output. lengths: [B] scheduled lengths; rows k > lengths[i] get no edits.
    """
    seqs: list[int] = []
    rows: list[int] = []
    ids_out: list[int] = []
    for i, request in enumerate(requests):
        generated = len(request.output_ids)
        if request.bad_words is None and generated >= request.params.min_tokens:
            continue
        drafts = [] if draft_tokens is None else [int(x) for x in draft_tokens[i]]
        length = len(drafts) if lengths is None else int(lengths[i])
        window = 0 if request.bad_words is None else request.bad_words.window
        base = request.last_ids(window)
        ids = base + drafts
        for k in range(length + 1):
            banned = sorted(_banned_ids(request, ids, len(base) + k, generated + k))
            seqs += [first_seq + i] * len(banned)
            rows += [k] * len(banned)
            ids_out += banned
    if not ids_out:
        return NO_EDITS
    return RowEdits(
        np.array(seqs, np.int64),
        np.array(rows, np.int64),
        np.array(ids_out, np.int64),
        np.full(len(ids_out), -np.inf, np.float32),
    )


def penalty_counts(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """How often each token occurs in `ids`: [V] int32."""
    counts = np.bincount(np.asarray(ids, np.int64), minlength=vocab_size)
    return counts.astype(np.int32)
