"""Commit against a loop."""

from __future__ import annotations

import numpy as np
import pytest
from op_harness import run_op

from dspark_trt.plugins.commit import commit

SLOTS, VOCAB = 11, 6


def feeds(
    chunk_tokens: list[int], decode_tokens: list[int], *, block: int, seed: int = 0, vocab=VOCAB
) -> dict[str, np.ndarray]:
    """Chunks give 0 or 1 token each, decoding requests 1 .. block + 1."""
    rng = np.random.default_rng(seed)
    n_out = np.array([*chunk_tokens, *decode_tokens], np.int32)
    out = np.full((len(n_out), block + 1), -1, np.int32)
    for r, n in enumerate(n_out):
        out[r, :n] = rng.integers(0, vocab, n)
    return {
        "slots": rng.permutation(SLOTS)[: len(n_out)].astype(np.int32),
        "chunk_lens": rng.integers(1, 9, len(chunk_tokens)).astype(np.int32),
        "out_tokens": out,
        "n_out": n_out,
        "last_token": rng.integers(0, vocab, SLOTS).astype(np.int32),
        "kv_len": rng.integers(0, 50, SLOTS).astype(np.int32),
        "output_counts": rng.integers(0, 4, (SLOTS, vocab)).astype(np.int32),
    }


def expected(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    state = {n: arrays[n].copy() for n in ("last_token", "kv_len", "output_counts")}
    chunks = len(arrays["chunk_lens"])
    for r, slot in enumerate(arrays["slots"]):
        tokens = arrays["out_tokens"][r, : arrays["n_out"][r]]
        state["kv_len"][slot] += arrays["chunk_lens"][r] if r < chunks else len(tokens)
        for token in tokens:
            state["last_token"][slot] = token
            state["output_counts"][slot, token] += 1
    return {f"{name}_out": array for name, array in state.items()}


def check(arrays: dict[str, np.ndarray], *, threads: int = 1) -> None:
    results = run_op(commit(), arrays, threads=threads)
    for name, want in expected(arrays).items():
        assert np.array_equal(results[name], want), name


@pytest.mark.parametrize("block", [0, 1, 4])
@pytest.mark.parametrize("chunks", [[], [0], [1], [0, 1, 1]])
@pytest.mark.parametrize("decode", [0, 1, 5])
def test_state_follows_the_verdict(block: int, chunks: list[int], decode: int) -> None:
    if not chunks and not decode:
        return
    for seed in range(4):
        lengths = np.random.default_rng(seed).integers(1, block + 2, decode).tolist()
        check(feeds(chunks, lengths, block=block, seed=seed))


def test_a_prompt_that_goes_on_keeps_its_last_token() -> None:
    arrays = feeds([0, 0], [], block=3)
    results = run_op(commit(), arrays)
    assert np.array_equal(results["last_token_out"], arrays["last_token"])
    assert np.array_equal(results["output_counts_out"], arrays["output_counts"])


def test_a_token_that_comes_many_times_in_a_step_is_counted_each_time() -> None:
    """With two threads too: additions to one cell must not race."""
    for seed in range(20):
        check(feeds([1], [10] * 9, block=9, vocab=2, seed=seed), threads=2)


def test_slots_that_are_not_in_the_step_keep_their_state() -> None:
    arrays = feeds([1], [2, 3], block=4)
    others = np.setdiff1d(np.arange(SLOTS), arrays["slots"])
    results = run_op(commit(), arrays)
    for name in ("last_token", "kv_len", "output_counts"):
        assert np.array_equal(results[f"{name}_out"][others], arrays[name][others])
