"""Steps for RaggedVerify: sequences with their own parameters, packed; and what must come out.

A `Sequence` says everything about one sequence of a step; `pack` makes the operator's inputs of a
list of them, `expected` asks `reference.law` for the tokens, `check` compares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from op_harness import run_op
from reference.law import draft_law, target_law, verify_block

from dspark_trt.plugins.ragged_verify import ragged_verify

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "penalty_prompt": False,
}  # fmt: skip
INTEGERS = ("top_k", "penalty_prompt", "bias_on")
TOP24 = 2.0**-24
LAST_U = 1 - TOP24  # the largest number that is drawn
BLOCK = 4


@dataclass
class Sequence:
    """`chunk_len` None = a decoding request with len(drafts) verified drafts."""

    # [rows, V]: l + 1 rows, or the asked rows of a chunk
    logits: np.ndarray
    params: dict[str, Any] = field(default_factory=dict)
    chunk_len: int | None = None
    emits: bool = True  # of a chunk: its last asked row draws a token
    drafts: list[int] = field(default_factory=list)
    # [G, V], also of drafts that are not verified
    draft_logits: np.ndarray | None = None
    draft_temperature: float | None = None  # None = temperature
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    banned: dict[int, list[int]] = field(default_factory=dict)  # row k -> ids
    u_accept: np.ndarray | None = None  # [G]
    u_recover: float = 0.0
    u_bonus: float = 0.0

    @property
    def length(self) -> int:
        return len(self.drafts)

    @property
    def heat(self) -> float:
        """The drafts' temperature."""
        given = self.draft_temperature
        return self.params.get("temperature", 1.0) if given is None else given


def uniforms(rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers as the runtime draws them: 24 bits in [0, 1), exact in float32."""
    return (rng.integers(0, 2**24, count) * TOP24).astype(np.float32)


def expected(sequences: list[Sequence], block: int) -> list[list[int]]:
    """The tokens of each sequence."""
    results = []
    for s in sequences:
        if s.chunk_len is not None and not s.emits:
            results.append([])
            continue
        first = len(s.logits) - 1 if s.chunk_len is not None else 0
        given = {n: _as_float32(v) for n, v in s.params.items()}
        laws = [
            target_law(
                s.logits[first + k],
                **given,
                prompt_ids=s.prompt_ids,
                output_ids=[*s.output_ids, *s.drafts[:k]],
                bias=s.bias,
                banned=s.banned.get(k, ()),
            )
            for k in range(s.length + 1)
        ]
        q = [draft_law(s.draft_logits[k], s.heat) for k in range(s.length)] if s.length else []
        u = s.u_accept if s.u_accept is not None else np.zeros(block)
        tokens = verify_block(laws, q, s.drafts, u[: s.length], s.u_recover, s.u_bonus)
        results.append([int(t) for t in tokens])
    return results


def _as_float32(value: Any) -> Any:
    return float(np.float32(value)) if isinstance(value, float) else value


def run(sequences: list[Sequence], *, block: int = BLOCK, **options: Any) -> list[list[int]]:
    """The tokens of each sequence; what stands past them must be -1."""
    vocab = sequences[0].logits.shape[1]
    feeds = pack(sequences, block=block, vocab=vocab, **options)
    results = run_op(ragged_verify(block_size=block), feeds)
    out, n_out = results["out_tokens"], results["n_out"]
    assert out.shape == (len(sequences), block + 1)
    assert np.all((out >= 0) == (np.arange(block + 1) < n_out[:, None]))
    assert np.all(out[out < 0] == -1)
    assert out.max() < vocab
    return [row[:n].tolist() for row, n in zip(out, n_out)]


def check(sequences: list[Sequence], *, block: int = BLOCK, **options: Any) -> list[list[int]]:
    tokens = run(sequences, block=block, **options)
    assert tokens == expected(sequences, block)
    return tokens


def pack(
    sequences: list[Sequence],
    *,
    block: int,
    vocab: int,
    padding: int = 0,
    seed: int = 0,
    nothing_drafted: bool = False,
) -> dict[str, np.ndarray]:
    """The operator's inputs: chunks must come first. Slots are dealt at random.

    Rows of nobody (context logits of a chunk, padding) hold what the sequence has there, or NaN.
    """
    rng = np.random.default_rng(seed)
    chunks = [s for s in sequences if s.chunk_len is not None]
    decode = sequences[len(chunks) :]
    assert all(s.chunk_len is None for s in decode)
    rows = [s.logits for s in sequences] + [np.full((padding, vocab), np.nan)]
    asked = np.cumsum([len(s.logits) for s in chunks])
    lens = [s.chunk_len for s in chunks] + [s.length + 1 for s in decode]
    m, n = sum(len(r) for r in rows), sum(lens) + padding
    feeds: dict[str, Any] = {
        "logits": np.concatenate(rows).astype(np.float32),
        "chunk_rows": [a - 1 if s.emits else -1 for s, a in zip(chunks, asked)],
        "lengths": [s.length for s in decode],
        "cu_seqlens": [0, *np.cumsum(lens)],
        "row_shift": np.array([m - n], np.int64),
        "u_extra": np.array([[s.u_recover, s.u_bonus] for s in sequences], np.float32),
    }
    feeds |= _edits(sequences, rng)
    feeds |= _slots(sequences, vocab, rng, drafter=block > 0)
    if block:
        feeds |= _drafts(decode, block, vocab, rng, nothing_drafted)
    return {n: a if isinstance(a, np.ndarray) else np.array(a, np.int32) for n, a in feeds.items()}


def _edits(sequences: list[Sequence], rng: np.random.Generator) -> dict[str, np.ndarray]:
    triples = [(r, k, i) for r, s in enumerate(sequences) for k, b in s.banned.items() for i in b]
    table = np.array(triples, np.int32).reshape(-1, 3)
    rng.shuffle(table)
    value = np.full(len(table), -np.inf, np.float32)
    return {"edit_seq": table[:, 0], "edit_k": table[:, 1], "edit_id": table[:, 2],
            "edit_value": value}  # fmt: skip


def _slots(
    sequences: list[Sequence], vocab: int, rng: np.random.Generator, *, drafter: bool
) -> dict[str, np.ndarray]:
    """Per-slot state; slots of nobody hold parameters that would change every law."""
    count = len(sequences) + 2
    slots = rng.permutation(count)[: len(sequences)].astype(np.int32)
    wild = {"temperature": 0.3, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 3.0,
            "presence_penalty": 2.0, "frequency_penalty": 2.0, "penalty_prompt": 1}  # fmt: skip
    state = {
        name: np.full(count, value, np.int32 if name in INTEGERS else np.float32)
        for name, value in wild.items()
    }
    state["bias_on"] = np.ones(count, np.int32)
    state["draft_temperature"] = np.full(count, 0.2, np.float32)
    counts = {n: rng.integers(0, 3, (count, vocab)).astype(np.int32) for n in ("prompt", "output")}
    bias = rng.normal(size=(count, vocab)).astype(np.float32) * 5
    for slot, s in zip(slots, sequences):
        for name, value in (NEUTRAL | s.params).items():
            state[name][slot] = value
        state["draft_temperature"][slot] = s.heat
        state["bias_on"][slot] = bool(s.bias)
        bias[slot] = 0
        for token, value in s.bias.items():
            bias[slot, token] = value
        for name, ids in (("prompt", s.prompt_ids), ("output", s.output_ids)):
            counts[name][slot] = np.bincount(np.array(ids, np.int64), minlength=vocab)
    if not drafter:
        del state["draft_temperature"]
    return state | {
        "slots": slots,
        "prompt_counts": counts["prompt"],
        "output_counts": counts["output"],
        "bias": bias,
    }


def _drafts(
    decode: list[Sequence], block: int, vocab: int, rng: np.random.Generator, nothing: bool
) -> dict[str, np.ndarray]:
    """Drafts past a request's length are there too: arbitrary tokens, the same logits."""
    tokens = rng.integers(0, vocab, (len(decode), block)).astype(np.int32)
    logits = np.zeros((0 if nothing else len(decode), block, vocab), np.float32)
    accept = np.zeros((len(decode), block), np.float32)
    for b, s in enumerate(decode):
        tokens[b, : s.length] = s.drafts
        if s.draft_logits is not None and not nothing:
            logits[b] = s.draft_logits
        if s.u_accept is not None:
            accept[b] = s.u_accept
    return {"draft_tokens": tokens, "draft_logits": logits, "u_accept": accept}
