"""At temperature 0 a drafter changes speed and never text.

Garbage drafters of every head at every depth, and a good one at every depth, against the same
engine without drafts and against Transformers' greedy tokens, by the rule of equality of parity.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import load_target, tiny_drafter, tiny_target
from markov_pair import markov_pair
from parity import GreedyReference, assert_same_greedy, reference_greedy, top2_gap
from reference.law import edit_logits
from tiny_engine import tiny_engine

from dspark_trt.runtime.budget import NoDraft, Policy, Static, Threshold
from dspark_trt.runtime.llm import LLM, Completion, SamplingParams

DEPTHS = range(1, 10)
HEADS = ("vanilla", "gated", "rnn", None)
COUNT = 40
LENGTHS = (1, 3, 8, 21)  # of the prompts; pages of four tokens, chunks of sixteen
SIZES: dict[str, Any] = {
    "max_batch_size": 4, "max_seq_len": 128, "max_num_tokens": 16, "page_size": 4,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


def prompts(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, vocab, length).tolist() for length in lengths]


class Target:
    """A target folder, its prompts and Transformers' greedy text of each."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.folder = folder
        self.model = load_target(folder)
        self.prompts = prompts(vocab)
        self.greedy: list[GreedyReference] = [
            reference_greedy(self.model, p, COUNT) for p in self.prompts
        ]

    def check(self, texts: list[Completion], label: str) -> None:
        for text, reference in zip(texts, self.greedy, strict=True):
            assert len(text.token_ids) == COUNT
            assert_same_greedy(text.token_ids, reference.ids, reference.gap, label=label)


def generate(llm: LLM, ids: list[list[int]], policy: Policy, params: Any = GREEDY) -> Any:
    llm.engine.policy = policy
    return llm.generate(ids, params)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    return Target(tiny_target(folder, "llama", vocab=48, hidden=32, kv_heads=2), 48)


@pytest.fixture(scope="module")
def plain(target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Texts of an engine that has no drafter at all."""
    llm = LLM(tiny_engine(tmp_path_factory.mktemp("plain") / "e", target.folder, **SIZES))
    texts = llm.generate(target.prompts, GREEDY)
    target.check(texts, "without a drafter")
    return [text.token_ids for text in texts]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("head", HEADS)
def test_garbage_drafts_of_any_head_at_any_depth(
    tmp_path: Path, target: Target, plain: list[list[int]], head: str | None, depth: int
) -> None:
    drafter = tiny_drafter(
        tmp_path, target.folder, head=head, block_size=depth, layers=1, seed=depth
    )
    llm = LLM(tiny_engine(tmp_path / "e", target.folder, drafter, **SIZES), threads=1)
    for policy in (NoDraft(), Static(), Threshold(0.5)):
        texts = generate(llm, target.prompts, policy)
        for text, ids, reference in zip(texts, plain, target.greedy, strict=True):
            assert_same_greedy(text.token_ids, ids, reference.gap, label=f"{head} {depth}")
        target.check(texts, f"{head} {depth} {policy.name}")
    assert llm.pool.num_free == llm.pool.capacity


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Target:
    target, _ = markov_pair(tmp_path_factory.mktemp("chain"), 48, layers=1, hidden=32)
    return Target(target, 48)


@pytest.mark.parametrize("depth", DEPTHS)
def test_good_drafts_at_any_depth(tmp_path: Path, chain: Target, depth: int) -> None:
    """The same chain with a drafter of this depth: accepted in whole, in part and not at all."""
    _, drafter = markov_pair(tmp_path, 48, layers=1, hidden=32, block_size=depth)
    llm = LLM(tiny_engine(tmp_path / "e", chain.folder, drafter, **SIZES), threads=1)
    policies = [Static(), Threshold(0.5), *(Static(n) for n in range(1, depth))]
    for policy in policies:
        texts = generate(llm, chain.prompts, policy)
        chain.check(texts, f"depth {depth} {policy.name} {policy.max_length}")
        if policy == Static():
            lengths = {n for t in texts for n in t.accepted_lengths_uncut}
            assert min(lengths) == 1 and max(lengths) > 1
            assert sum(t.accepted_lengths[-1] for t in texts) > 0
        for text in texts:
            assert 1 + sum(text.accepted_lengths) == COUNT


# --- sampling parameters at temperature 0 ------------------------------------------------------


def edited_greedy(
    model: Any, prompt: list[int], params: SamplingParams, ends: Sequence[int] = ()
) -> tuple[list[int], list[np.ndarray]]:
    """Greedy text under `params` from Transformers' logits, and the edited rows behind it."""
    output: list[int] = []
    rows: list[np.ndarray] = []
    words = [tuple(w) for w in params.bad_words]
    while len(output) < params.max_tokens:
        ids = [*prompt, *output]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double().numpy()
        banned = {w[-1] for w in words if len(w) == 1 or tuple(ids[1 - len(w) :]) == w[:-1]}
        if len(output) < params.min_tokens:
            banned |= set(ends)
        rows.append(
            edit_logits(
                logits,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                penalty_prompt=params.penalty_prompt,
                prompt_ids=prompt,
                output_ids=output,
                bias=dict(params.logit_bias or {}),
                banned=banned,
            )
        )
        token = int(np.argmax(rows[-1]))
        if token in ends:
            break
        output.append(token)
    return output, rows


@pytest.fixture(scope="module")
def chain_llm(tmp_path_factory: pytest.TempPathFactory, chain: Target) -> LLM:
    folder = tmp_path_factory.mktemp("chain-engine")
    _, drafter = markov_pair(folder, 48, layers=1, hidden=32)
    sizes = SIZES | {"gather_context_logits": True}
    return LLM(tiny_engine(folder / "e", chain.folder, drafter, **sizes), threads=1)


PROCESSED: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 4.0},
    "presence with the prompt": {"presence_penalty": 4.0, "penalty_prompt": True},
    "repetition": {"repetition_penalty": 1.5},
    "rewarded repetition": {"repetition_penalty": 0.8, "frequency_penalty": -0.2},
    "all penalties": {
        "repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5,
        "penalty_prompt": True,
    },
    "bias": {"logit_bias": {7: 6.0, 8: -6.0, 9: 3.0}},
    "bad words": {"bad_words": ((5,), (11,), (20, 21), (7, 9, 7))},
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSED)
def test_parameters_act_at_every_position_of_a_block(
    chain: Target, chain_llm: LLM, name: str
) -> None:
    params = replace(GREEDY, max_tokens=24, **PROCESSED[name])
    ids = [[9] * 10 + p for p in chain.prompts]
    drafted = generate(chain_llm, ids, Static(), params)
    undrafted = generate(chain_llm, ids, NoDraft(), params)
    assert max(n for t in drafted for n in t.accepted_lengths) > 1
    for prompt, a, b in zip(ids, drafted, undrafted):
        reference, rows = edited_greedy(chain.model, prompt, params)
        for text in (a, b):
            assert_same_greedy(
                text.token_ids, reference, lambda at, rows=rows: top2_gap(rows[at]), label=name
            )


def test_each_of_a_batch_has_its_own_parameters(chain: Target, chain_llm: LLM) -> None:
    each = [replace(GREEDY, max_tokens=24, **fields) for fields in PROCESSED.values()]
    ids = [[9, 4, 9, 17]] * len(each)
    together = generate(chain_llm, ids, Static(), each)
    alone = [generate(chain_llm, [[9, 4, 9, 17]], Static(), [p])[0] for p in each]
    assert [t.token_ids for t in together] == [t.token_ids for t in alone]
    assert len({tuple(t.token_ids) for t in together}) > len(each) // 2


def test_tokens_of_the_prompt_alone_are_not_penalised_as_output(chain_llm: LLM) -> None:
    """Ten copies of the token that comes next: presence leaves it, with the prompt it does not."""
    first = generate(chain_llm, [[9]], Static(), replace(GREEDY, max_tokens=1))[0].token_ids[0]
    prompt = [[first] * 10 + [9]]
    token = generate(chain_llm, prompt, Static(), replace(GREEDY, max_tokens=1))[0].token_ids[0]
    prompt = [[token] * 10 + prompt[0]]
    one = replace(GREEDY, max_tokens=1)
    before = generate(chain_llm, prompt, Static(), one)[0].token_ids
    output_only = generate(chain_llm, prompt, Static(), replace(one, presence_penalty=100.0))
    assert output_only[0].token_ids == before
    counted = replace(one, presence_penalty=100.0, penalty_prompt=True)
    assert generate(chain_llm, prompt, Static(), counted)[0].token_ids[0] not in prompt[0]


# --- logits of the right row -------------------------------------------------------------------


def test_logprobs_and_context_logits_belong_to_their_request(chain_llm: LLM) -> None:
    """Eight requests of 3 to 97 tokens, half of them with logprobs: equal to each run alone."""
    ids = prompts(48, (3, 97, 16, 17, 50, 4, 33, 64))
    each = [replace(GREEDY, max_tokens=12, logprobs=3 if i % 2 else None) for i in range(8)]
    chain_llm.engine.policy = Static()
    together = chain_llm.generate(ids, each, return_context_logits=True)
    for i, text in enumerate(together):
        (alone,) = chain_llm.generate([ids[i]], [each[i]], return_context_logits=True)
        assert text.token_ids == alone.token_ids
        assert text.context_logits is not None and alone.context_logits is not None
        assert text.context_logits.shape == (len(ids[i]), 48)
        assert np.abs(text.context_logits - alone.context_logits).max() < 1e-4
        assert (text.logprobs is None) == (i % 2 == 0)
        for a, b in zip(text.logprobs or (), alone.logprobs or (), strict=True):
            assert a.token_id == b.token_id == a.top[0][0]
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert a.logprob < 0 and np.exp([p for _, p in a.top]).sum() < 1
