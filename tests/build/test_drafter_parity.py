"""The draft graph and the K/V injection against the plain reading of the method.

Verification is steered: of each real draft the first j tokens are replaced by the target's own
greedy tokens, j going through 0, G, G / 2 and 1: blocks are accepted in part, whole, not at all.
What the drafter proposes after every such history must be the reference's.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_recorder import Block, Recorder, knowing
from factories import load_target, tiny_drafter, tiny_target
from parity import assert_close_logits, assert_same_greedy, first_difference, top2_gap
from reference.drafter import ReferenceDrafter
from safetensors.numpy import load_file, save_file
from tiny_engine import tiny_engine

from dspark_trt.build.drafter_checkpoint import write_compact
from dspark_trt.runtime.budget import NoDraft, Static
from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.runtime.request import Request

BOUND = 1e-4
CONTEXTS = (1, 20, 100)  # prompt lengths = context lengths of each request's first block


@dataclass(frozen=True)
class Case:
    """One drafter on one target."""

    drafter: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    page_size: int = 8


HEADS = {
    f"{head}-{confidence}": Case({"head": head, "confidence": confidence})
    for head in ("vanilla", "gated", "rnn", None)
    for confidence in ("markov", "plain", None)
    if not (head is None and confidence == "markov")
}
CASES = HEADS | {
    "own-embed": Case({"own_embed": True}),
    "own-lm-head": Case({"own_lm_head": True, "head": "gated"}),
    "own-both": Case({"own_embed": True, "own_lm_head": True, "head": "rnn"}),
    "copies-of-the-targets": Case({"own_embed": "copy", "own_lm_head": "copy"}),
    "tied-target": Case({"head": "rnn"}, {"tie": True}),
    "tied-target-own-lm-head": Case({"own_lm_head": True}, {"tie": True}),
    "bf16": Case({"dtype": "bfloat16", "head": "rnn"}),
    "fp16-bare-names": Case({"dtype": "float16", "bare_markov_names": True}),
    "biases": Case({"attention_bias": True}),
    "embedding-alone": Case({"target_layer_ids": (-1,)}),
    "one-layer-of-five": Case({"target_layer_ids": (1,), "layers": 1}, {"layers": 5}),
    "many-layers": Case({"target_layer_ids": (-1, 0, 2, 3), "layers": 3}, {"layers": 5}),
    "rank-as-large-as-v": Case({"rank": 256}),
    "block-1": Case({"block_size": 1, "head": "rnn"}),
    "block-7": Case({"block_size": 7, "head": "gated"}),
    "block-9-page-1": Case({"block_size": 9, "head": "rnn"}, page_size=1),
    "page-3": Case({"head": "gated"}, page_size=3),
    "page-64": Case({"head": "rnn"}, page_size=64),
    "on-qwen2": Case({"head": "gated"}, family="qwen2"),
    "on-qwen3": Case({"head": "rnn"}, family="qwen3"),
    "on-llama3": Case(family="llama3"),
    "on-mistral-window": Case(family="mistral", target={"sliding_window": 8}),
}


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 256, count).tolist()


def build(folder: Path, case: Case, drafter: Path | None = None) -> tuple[LLM, Path, Path]:
    """The loaded engine, and the folders of target and drafter."""
    target = tiny_target(folder, case.family, **({"layers": 3} | case.target))
    drafter = drafter or tiny_drafter(folder, target, **case.drafter)
    engine = tiny_engine(
        folder / "engine", target, drafter, max_seq_len=160, page_size=case.page_size
    )
    return LLM(engine, threads=1), target, drafter


def steered_blocks(llm: LLM) -> list[Block]:
    """Decode CONTEXTS together with steered acceptance; the text must be that of plain decoding."""
    block = llm.executor.block_size
    prompts = [random_ids(count, seed) for seed, count in enumerate(CONTEXTS)]
    params = SamplingParams(max_tokens=2 * block + 8, ignore_eos=True)
    llm.engine.policy = NoDraft()
    plain = {tuple(p): d.token_ids for p, d in zip(prompts, llm.generate(prompts, params))}
    llm.engine.policy = Static()
    accepted = (0, block, block // 2, 1)  # of the steps in turn, each request starting elsewhere

    def length(request: Request) -> int:
        return accepted[(request.step + len(request.prompt_ids) // 20) % len(accepted)]

    recorder = Recorder(llm, knowing(plain, length))
    done = llm.generate(prompts, params)
    assert [d.token_ids for d in done] == [plain[tuple(p)] for p in prompts]
    lengths = {n for d in done for n in d.accepted_lengths_uncut}
    assert {1, block + 1} <= lengths
    return recorder.blocks


def check(block: Block, reference: ReferenceDrafter) -> None:
    """One block against the reference, up to where its tokens part (by the rule of equality)."""
    hot = block.temperature > 0
    numbers = [float(u) for u in block.uniforms] if hot else None
    expected = reference.draft(block.history, temperature=block.temperature, uniforms=numbers)
    logits = expected.logits.numpy()
    ours = block.tokens.tolist()
    if hot:
        assert ours == expected.tokens
    else:
        assert_same_greedy(ours, expected.tokens, lambda i: top2_gap(logits[i]))
    at = first_difference(ours, expected.tokens)
    same = len(ours) if at is None else at + 1
    assert_close_logits(block.logits[:same], logits[:same], bound=BOUND)
    if expected.conf_logits is None:
        assert np.isposinf(block.conf_logits).all()
    else:
        confidences = expected.conf_logits.numpy()
        assert np.abs(block.conf_logits[:same] - confidences[:same]).max() <= BOUND


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_drafts_over_steps_with_partial_acceptance(tmp_path: Path, case: Case) -> None:
    llm, target, drafter = build(tmp_path, case)
    reference = ReferenceDrafter(drafter, load_target(target))
    blocks = steered_blocks(llm)
    starts = {len(b.history) - 1 for b in blocks}
    assert set(CONTEXTS) <= starts  # the first block of each prompt
    for block in blocks:
        check(block, reference)


def test_compact_int8_drafter(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "llama", layers=3)
    plain = tiny_drafter(tmp_path, target, head="rnn", own_lm_head=True)
    compact, widened = tmp_path / "compact", tmp_path / "widened"
    for folder in (compact, widened):
        folder.mkdir()
        shutil.copy(plain / "config.json", folder)
    write_compact(compact / "model.safetensors", load_file(plain / "model.safetensors"))
    stored = load_file(compact / "model.safetensors")
    wide = {
        name: value.astype(np.float32) * stored[f"{name}.scale"][:, None]
        if value.dtype == np.int8
        else value
        for name, value in stored.items()
        if not name.endswith(".scale")
    }
    assert any(value.dtype == np.int8 for value in stored.values())
    save_file(wide, widened / "model.safetensors")
    engine = tiny_engine(tmp_path / "engine", target, compact, max_seq_len=160, page_size=4)
    reference = ReferenceDrafter(widened, load_target(target))
    for block in steered_blocks(LLM(engine, threads=1)):
        check(block, reference)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_sampled_drafts_follow_their_uniforms(tmp_path: Path, head: str | None) -> None:
    llm, target, drafter = build(tmp_path, Case({"head": head}))
    reference = ReferenceDrafter(drafter, load_target(target))
    recorder = Recorder(llm)
    prompts = [random_ids(count, seed) for seed, count in enumerate((3, 30, 17))]
    params = [
        SamplingParams(max_tokens=8, temperature=1.5, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.7, draft_temperature=3.0, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.0, draft_temperature=0, ignore_eos=True),
    ]
    llm.generate(prompts, params)
    assert {b.temperature for b in recorder.blocks} == {1.5, 3.0, 0.0}
    for block in recorder.blocks:
        check(block, reference)


def test_context_is_injected_on_steps_that_draft_nothing(tmp_path: Path) -> None:
    """Plain steps in between leave no hole in the drafter's context."""
    llm, target, drafter = build(tmp_path, Case({"head": "rnn"}))
    reference = ReferenceDrafter(drafter, load_target(target))
    recorder = Recorder(llm)
    request_ids = random_ids(9, 3)
    generator = llm.stream(request_ids, SamplingParams(max_tokens=30, ignore_eos=True))
    for i, _ in enumerate(generator):
        llm.engine.policy = NoDraft() if i % 3 else Static()
    assert 3 <= len(recorder.blocks) < 20
    for block in recorder.blocks:
        check(block, reference)
