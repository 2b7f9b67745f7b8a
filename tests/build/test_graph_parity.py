"""The target graph against Transformers' own classes: every family, every position, every token."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import load_target, rope, tiny_target
from parity import (
    assert_close_logits,
    assert_same_greedy,
    first_difference,
    reference_greedy,
    reference_logits,
)
from tiny_engine import tiny_engine

from dspark_trt.runtime.llm import LLM, SamplingParams

BOUND = 1e-4  # float32, logits of a standard deviation of about 4
TOKENS = 80
CHUNK = 32  # of max_num_tokens: prompts are split, and split differently in a batch
DECODED = 40


@dataclass(frozen=True)
class Case:
    """One checkpoint: a family and what sets it apart."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


LINEAR = rope(10000.0, "linear") | {"factor": 4.0}
CASES = {
    "llama": Case("llama"),
    "llama-tied": Case("llama", {"tie": True}),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-bf16-sharded": Case("llama", {"dtype": "bfloat16", "shard_size": "40KB"}),
    "llama-fp16-tied": Case("llama", {"dtype": "float16", "tie": True}),
    "llama-wide-heads": Case("llama", {"head_dim": 40, "heads": 2, "kv_heads": 2}),
    "llama-one-kv-head": Case("llama", {"kv_heads": 1, "layers": 1}),
    "llama-page-of-one": Case("llama", engine={"page_size": 1}),
    "llama3": Case("llama3"),
    "llama3-v4-config": Case("llama3", {"legacy_config": True}),
    "linear-rope": Case("llama", {"rope_parameters": LINEAR}),
    "linear-rope-v4-config": Case("llama", {"rope_parameters": LINEAR, "legacy_config": True}),
    "qwen2": Case("qwen2"),
    "qwen2-tied-bf16": Case("qwen2", {"tie": True, "dtype": "bfloat16"}),
    "qwen2-windows-above-a-layer": Case(
        "qwen2",
        {"layers": 3, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": Case("qwen3"),
    "qwen3-tied-sharded": Case("qwen3", {"tie": True, "shard_size": "40KB"}),
    "qwen3-biases": Case("qwen3", {"attention_bias": True}),
    "mistral-window": Case("mistral"),
    "mistral-window-of-one-page": Case("mistral", {"sliding_window": 8, "tie": True}),
    "mistral-window-of-two-tokens": Case("mistral", {"sliding_window": 2}),
    "mistral-no-window": Case("mistral", {"sliding_window": None}),
}


@pytest.fixture(scope="module", params=CASES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine, oracle) of one case; the oracle holds the file's weights in float32."""
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("parity")
    target = tiny_target(folder, case.family, **case.fields)
    options = {"max_num_tokens": CHUNK} | case.engine
    return LLM(tiny_engine(folder / "engine", target, **options), threads=1), load_target(target)


def random_ids(count: int, seed: int, vocab: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(2, vocab, count).tolist()


def test_logits_at_every_position(models: Any) -> None:
    llm, oracle = models
    prompts = [random_ids(count, seed) for seed, count in enumerate((TOKENS, 1, 33, 7))]
    done = llm.generate(prompts, SamplingParams(max_tokens=1), return_context_logits=True)
    for prompt, completion in zip(prompts, done, strict=True):
        expected = reference_logits(oracle, prompt)
        assert_close_logits(completion.context_logits, expected, bound=BOUND)


def test_decoded_tokens_and_their_logits(models: Any) -> None:
    llm, oracle = models
    prompts = [random_ids(count, 10 + seed) for seed, count in enumerate((45, 1, 33, 7))]
    params = SamplingParams(max_tokens=DECODED, ignore_eos=True)
    done = llm.generate(prompts, params, return_generation_logits=True)
    for prompt, completion in zip(prompts, done, strict=True):
        expected = reference_greedy(oracle, prompt, DECODED)
        assert_same_greedy(completion.token_ids, expected.ids, expected.gap)
        same = first_difference(completion.token_ids, expected.ids) or DECODED
        ours = completion.generation_logits
        assert_close_logits(ours[:same], expected.logits[:same], bound=BOUND)


def test_a_chunk_of_one_token_gives_the_same_logits(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "qwen3")
    llm = LLM(tiny_engine(tmp_path / "engine", target, max_num_tokens=1), threads=1)
    prompt = random_ids(20, 3)
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=1), return_context_logits=True)
    assert done.context_logits is not None
    expected = reference_logits(load_target(target), prompt)
    assert_close_logits(done.context_logits, expected, bound=BOUND)


def test_a_long_text_through_llama3_scaling(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, "llama3")
    llm = LLM(tiny_engine(tmp_path / "engine", target, max_seq_len=512), threads=1)
    prompt = random_ids(500, 4)
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=1), return_context_logits=True)
    assert done.context_logits is not None
    expected = reference_logits(load_target(target), prompt)
    assert_close_logits(done.context_logits, expected, bound=2 * BOUND)
