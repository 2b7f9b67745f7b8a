"""SmolLM2-135M-Instruct from its GGUF file, float32, against Transformers on the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_recorder import Recorder, knowing
from factories import tiny_drafter
from parity import (
    assert_close_logits,
    assert_same_greedy,
    first_difference,
    reference_along,
    reference_logits,
)
from real_prompts import ROOT, prompts
from transformers import AutoModelForCausalLM

from dspark_trt.runtime.llm import LLM, SamplingParams
from dspark_trt.runtime.request import Request

LOGIT_BOUND = 1e-3
MEBI = 1 << 20

# Reports resident bytes at import and at the peak, as JSON.
BUILD = """
import json, sys
from pathlib import Path
from dspark_trt.build.builder import BuildOptions, build_engine
def peak():  # of this process alone: ru_maxrss starts from the parent's
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0
before = peak()
build_engine(BuildOptions(
    model=Path(sys.argv[1]), output=Path(sys.argv[2]), max_seq_len=1024, max_num_tokens=192,
    gather_context_logits=True, drafter=Path(sys.argv[3]) if len(sys.argv) > 3 else None,
))
print(json.dumps({"before": before, "peak": peak()}))
"""
SERVE = """
import json, sys
from pathlib import Path
from dspark_trt.runtime.llm import LLM, SamplingParams
def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0
before = resident()
llm = LLM(sys.argv[1])
llm.generate([list(range(100, 500))] * 4, SamplingParams(max_tokens=16, ignore_eos=True))
touched = -(-4 * 416 // llm.manifest.page_size) * llm.manifest.page_size
per_token = llm.executor.kv_bytes / (llm.pool.num_pages * llm.manifest.page_size)
print(json.dumps({"before": before, "after": resident(), "kv": touched * per_token}))
"""


def run(script: str, *arguments: object) -> dict[str, float]:
    """Run a script in a process of its own and read what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="session")
def built(
    smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, float]]:
    """The engine directory, and what its build took."""
    folder = tmp_path_factory.mktemp("smollm2") / "engine"
    return folder, run(BUILD, smollm2_gguf, folder)


@pytest.fixture(scope="session")
def llm(built: tuple[Path, dict[str, float]]) -> LLM:
    return LLM(built[0], verify="size")


@pytest.fixture(scope="session")
def oracle(smollm2_gguf: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    return model.eval()


def test_logits_at_every_position_of_real_text(llm: LLM, oracle: Any) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text)[:512]
    assert len(ids) == 512
    (done,) = llm.generate([ids], SamplingParams(max_tokens=1), return_context_logits=True)
    assert done.context_logits is not None
    expected = reference_logits(oracle, ids)
    assert_close_logits(done.context_logits, expected, bound=LOGIT_BOUND)
    assert done.token_ids == [int(expected[-1].argmax())]


def compare(llm: LLM, oracle: Any, texts: Sequence[str], count: int) -> None:
    """Greedy answers of `count` tokens at most, by the rule of equality."""
    encoded = [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    done = llm.generate(encoded, SamplingParams(max_tokens=count))
    differing = 0
    for i, (ids, ours) in enumerate(zip(encoded, done)):
        expected = reference_along(oracle, ids, ours.token_ids, count, llm.eos_token_ids)
        at = assert_same_greedy(ours.token_ids, expected.ids, expected.gap, label=f"prompt {i}")
        differing += at is not None
        if at is None and len(expected.ids) < count:
            assert ours.finish_reason == "stop"
    print(f"{len(texts)} prompts, {differing} with a difference at a top-2 gap below the bound")


def test_greedy_answers(llm: LLM, oracle: Any) -> None:
    compare(llm, oracle, prompts(6), 48)


@pytest.mark.slow
def test_greedy_answers_at_length(llm: LLM, oracle: Any) -> None:
    compare(llm, oracle, prompts(64), 128)


def test_an_answer_makes_sense(llm: LLM) -> None:
    (done,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(max_tokens=24),
    )
    assert "Paris" in done.text


def test_a_build_peaks_below_the_size_of_its_weights(
    built: tuple[Path, dict[str, float]],
) -> None:
    folder, memory = built
    if not memory["peak"]:
        pytest.skip("no VmHWM in /proc here")
    weights = (folder / "weights.bin").stat().st_size
    used = memory["peak"] - memory["before"]
    print(f"build: {used / MEBI:.0f} MiB at the peak, weights {weights / MEBI:.0f} MiB")
    assert used < 1.4 * weights


@pytest.mark.slow
def test_a_loaded_engine_takes_little_more_than_its_weights(
    built: tuple[Path, dict[str, float]],
) -> None:
    folder, _ = built
    weights = (folder / "weights.bin").stat().st_size
    memory = run(SERVE, folder)
    used = memory["after"] - memory["before"]
    print(f"loaded: {used / MEBI:.0f} MiB, weights {weights / MEBI:.0f} MiB")
    assert used < 1.3 * weights + memory["kv"]


@pytest.mark.slow
def test_drafts_leave_greedy_answers_as_they_are(
    llm: LLM, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """A random drafter on the real model; some of its drafts are put right, so all counts occur."""
    target = llm.manifest.target
    layer: Any = target["layer"]
    config = {
        "hidden_size": layer["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_hidden_layers": target["num_layers"],
        "max_position_embeddings": target["max_position"],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    drafter = tiny_drafter(tmp_path, tmp_path, head="gated", rank=32, target_layer_ids=(3, 14, 25))
    run(BUILD, smollm2_gguf, tmp_path / "engine", drafter)
    drafting = LLM(tmp_path / "engine", verify="size")
    encoded = [llm.chat_prompt([{"role": "user", "content": text}]) for text in prompts(6)]
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    plain = llm.generate(encoded, params)
    known = {tuple(p.prompt_ids): p.token_ids for p in plain}

    def accepted(request: Request) -> int:
        return request.step % (drafting.executor.block_size + 1)

    recorder = Recorder(drafting, knowing(known, accepted))
    drafted = drafting.generate(encoded, params, return_context_logits=False)
    assert recorder.blocks and drafting.engine.metrics.mean_accepted_length > 2
    for expected, ours in zip(plain, drafted):
        at = first_difference(ours.token_ids, expected.token_ids)
        if at is not None:  # plain decoding's own logits say whether rounding chose
            ids = expected.prompt_ids + expected.token_ids[:at]
            (row,) = llm.generate([ids], SamplingParams(max_tokens=1, logprobs=2))
            assert row.logprobs is not None
            (_, first), (_, second) = row.logprobs[0].top
            assert_same_greedy(
                ours.token_ids, expected.token_ids, lambda _, gap=first - second: gap
            )
        assert np.isfinite(recorder.blocks[0].logits).all()
