"""A token whose K/V is NaN harms the request that has it, and nobody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_driver import PROMPTS, texts
from markov_pair import markov_pair
from safetensors.numpy import load_file, save_file
from tiny_engine import tiny_engine

from dspark_trt.runtime.executor_onnxruntime import Drafts
from dspark_trt.runtime.llm import LLM, SamplingParams

BAD = 100  # the token
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
CLEAN = [[i for i in prompt if i != BAD] for prompt in PROMPTS[:3]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights are finite. Dimension 0 of the residual is BAD's own and unused by the rest; in
    layer 0 its MLP gives inf - inf, so that the next layer's K and V of that position are NaN."""
    folder = tmp_path_factory.mktemp("poison")
    target, drafter = markov_pair(folder, 128, noise=0.1)
    weights = load_file(target / "model.safetensors")
    embed = weights["model.embed_tokens.weight"]
    embed[:, 0] = 0
    embed[BAD] = 0
    embed[BAD, 0] = 1
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    for part in ("gate_proj", "up_proj"):
        weight = weights[f"model.layers.0.mlp.{part}.weight"]
        weight[:, 0] = 0
        weight[:2, 0] = 3e19
    down = weights["model.layers.0.mlp.down_proj.weight"]
    down[1, :2] = 1, -1
    weights["lm_head.weight"][:, 0] = 0
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return tiny_engine(folder / "engine", target, drafter)


def test_pages_of_a_poisoned_request_are_clean_for_the_next(engine: Path) -> None:
    llm = LLM(engine, threads=1, kv_pages=16)
    before = texts(llm.generate(CLEAN, PARAMS))
    poisoned = SamplingParams(max_tokens=100, ignore_eos=True)
    llm.generate([[5, BAD, 7, 8] * 5], poisoned)
    assert any(np.isnan(pages).any() for pages in llm.executor._pages.values())
    assert texts(llm.generate(CLEAN, PARAMS)) == before


@pytest.mark.parametrize("position", [0, 3])
def test_a_poisoned_draft_does_not_reach_the_rows_before_it(
    engine: Path, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = texts(LLM(engine, threads=1).generate(CLEAN, PARAMS))
    llm = LLM(engine, threads=1)
    original = llm.executor.draft

    def draft(slots: np.ndarray, u_draft: np.ndarray) -> Drafts:
        drafts = original(slots, u_draft)
        tokens = drafts.tokens.copy()
        tokens[:, position] = BAD
        return Drafts(tokens, drafts.conf_logits, drafts.logits, drafts.seconds)

    monkeypatch.setattr(llm.executor, "draft", draft)
    assert texts(llm.generate(CLEAN, PARAMS)) == expected
