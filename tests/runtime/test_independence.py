"""A request's text is its own: no number serves twice, no batch mate and no order is felt."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markov_pair import markov_pair
from tiny_engine import tiny_engine

from dspark_trt.runtime import engine as engine_module
from dspark_trt.runtime import sampling
from dspark_trt.runtime.budget import NoDraft, Policy, Static, Threshold
from dspark_trt.runtime.llm import LLM, Completion, SamplingParams

VOCAB = 64
HOT = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
POLICIES = (Static(), Static(2), Threshold(0.5), NoDraft())


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("independence")
    target, drafter = markov_pair(folder, VOCAB, layers=1, hidden=32)
    return tiny_engine(
        folder / "engine", target, drafter, max_batch_size=16, max_num_tokens=64, page_size=4
    )


@pytest.fixture(scope="module")
def llm(engine_dir: Path) -> LLM:
    return LLM(engine_dir, threads=1)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, rng.integers(1, 9)).tolist() for _ in range(count)]


def mixed(count: int) -> list[SamplingParams]:
    """Greedy, sampled, filtered, penalised and banned, each with its seed."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8, "draft_temperature": 0.0},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
        {"top_k": 5, "logit_bias": {3: 2.0}},
        {"bad_words": ((4,), (5, 6)), "temperature": 2.0},
    ]
    return [replace(HOT, seed=i, **kinds[i % len(kinds)]) for i in range(count)]


def run(
    llm: LLM, ids: list[list[int]], params: list[SamplingParams], policy: Policy | None = None
) -> list[Completion]:
    llm.engine.policy = policy or Static()
    return llm.generate(ids, params)


def ids_of(texts: list[Completion]) -> list[list[int]]:
    return [text.token_ids for text in texts]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name + str(p.max_length or ""))
def test_a_seed_repeats_its_text_alone_and_in_any_batch(llm: LLM, policy: Policy) -> None:
    ids, params = prompts(12), mixed(12)
    alone = [run(llm, [i], [p], policy)[0].token_ids for i, p in zip(ids, params)]
    assert len({tuple(text) for text in alone}) == 12
    together = run(llm, ids, params, policy)
    assert ids_of(together) == alone
    backwards = run(llm, ids[::-1], params[::-1], policy)
    assert ids_of(backwards) == alone[::-1]
    by_three = [run(llm, ids[i : i + 3], params[i : i + 3], policy) for i in range(0, 12, 3)]
    assert [t for part in by_three for t in ids_of(part)] == alone


def test_accepted_lengths_follow_the_request_too(llm: LLM) -> None:
    ids, params = prompts(12), mixed(12)
    together = run(llm, ids, params)
    order = np.random.default_rng(1).permutation(12)
    permuted = run(llm, [ids[i] for i in order], [params[i] for i in order])
    for place, i in enumerate(order):
        assert permuted[place].token_ids == together[i].token_ids
        assert permuted[place].accepted_lengths == together[i].accepted_lengths


def test_equal_requests_in_one_batch_have_equal_texts(llm: LLM) -> None:
    """Same seed, same prompt: the same numbers, and one never takes the other's."""
    ids = prompts(3)
    texts = run(llm, [ids[0], ids[1], ids[0], ids[2], ids[0]], [replace(HOT, seed=5)] * 5)
    assert texts[0].token_ids == texts[2].token_ids == texts[4].token_ids
    assert texts[0].token_ids == run(llm, [ids[0]], [replace(HOT, seed=5)])[0].token_ids
    assert len({tuple(t) for t in ids_of(texts)}) == 3


def test_seeds_prompts_and_sequences_have_numbers_of_their_own(llm: LLM) -> None:
    """Flat laws, so that equal numbers would show as equal texts."""
    flat = replace(HOT, temperature=1e9, max_tokens=16)
    texts = run(llm, [[5]] * 8, [replace(flat, seed=s) for s in range(8)])
    texts += run(llm, [[7]] * 8, [replace(flat, seed=s) for s in range(8)])
    texts += run(llm, [[5]], [replace(flat, seed=0, n=8)])[1:]
    assert len({tuple(t) for t in ids_of(texts)}) == len(texts) == 23


def test_a_seed_repeats_its_text_after_preemption(engine_dir: Path, llm: LLM) -> None:
    """So few pages that requests give theirs back and are computed again."""
    ids, params = prompts(8), mixed(8)
    want = ids_of(run(llm, ids, params))
    small = LLM(engine_dir, threads=1, kv_pages=16)
    assert ids_of(run(small, ids, params)) == want
    assert small.engine.batcher.preemptions > 0
    assert small.pool.num_free == 16


def test_sharp_rows_follow_their_law_beside_greedy_and_hot_ones(llm: LLM) -> None:
    """Rows that sample from a law of one likely token, mixed with others: none is mistaken."""
    ids = prompts(8)
    cold = [replace(HOT, temperature=1e-9, seed=i) for i in range(8)]
    greedy = ids_of(run(llm, ids, [replace(HOT, temperature=0.0)] * 8))
    assert ids_of(run(llm, ids, cold)) == greedy
    hot = replace(HOT, temperature=5.0, seed=77)
    params = [hot if i % 3 == 0 else cold[i] for i in range(8)]
    params[4] = replace(HOT, temperature=0.0)
    texts = ids_of(run(llm, ids, params))
    for i in range(8):
        assert (texts[i] == greedy[i]) == (i % 3 != 0)


class Recorder:
    """Every (counter, key) that the runtime draws at, as tuples of their six words."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: Counter[tuple[int, ...]] = Counter()
        real = sampling.philox4x32

        def recording(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
            shape = np.broadcast_shapes(counter.shape[1:], key.shape[1:])
            words = [*np.broadcast_to(counter, (4, *shape)), *np.broadcast_to(key, (2, *shape))]
            columns = np.stack([w.reshape(-1) for w in words], axis=1)
            self.drawn.update(map(tuple, columns.tolist()))
            return real(counter, key)

        monkeypatch.setattr(sampling, "philox4x32", recording)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name + str(p.max_length or ""))
def test_no_number_is_drawn_twice(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """Prompts of one chunk each, so that every draw of a step is that step's own."""
    recorder = Recorder(monkeypatch)
    params = [replace(p, n=2) for p in mixed(12) if p.temperature > 0]
    texts = run(llm, [[7, 2 + i] for i in range(len(params))], params, policy)
    assert set(recorder.drawn.values()) == {1}
    block = llm.engine.block_size
    places = {(stream, k) for _, stream, k, _, *_ in recorder.drawn}
    assert places == {(s, k) for s in (0, 1) for k in range(1, block + 1)} | {(2, 0), (3, 0)}
    keys = {words[4:] for words in recorder.drawn}
    assert len(keys) == len(texts)
    steps = Counter((words[4:], words[0]) for words in recorder.drawn)
    assert set(steps.values()) == {2 * block + 2}
    assert len(steps) == sum(1 + len(t.accepted_lengths_uncut) for t in texts)


def test_a_position_drafted_again_meets_fresh_numbers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection the same position comes again; its numbers must not."""
    seen: list[np.ndarray] = []
    real = engine_module.draw_uniforms

    def recording(*args: Any) -> sampling.Uniforms:
        drawn = real(*args)
        seen.append(np.concatenate([drawn.draft, drawn.accept, drawn.extra], axis=1))
        return drawn

    monkeypatch.setattr(engine_module, "draw_uniforms", recording)
    (text,) = run(llm, [[5, 9]], [replace(HOT, max_tokens=40)])
    assert min(text.accepted_lengths) == 1  # rejected at once: the other positions come again
    numbers = np.concatenate(seen).ravel()
    assert len(np.unique(numbers)) == len(numbers)


def test_a_temperature_of_zero_needs_no_numbers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    run(llm, prompts(3), [replace(HOT, temperature=0.0)] * 3)
    assert not recorder.drawn
