"""No step has more rows than max_num_tokens, whoever decodes and whatever a policy asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, PROMPTS, drain, ids, submit, texts

from dspark_trt.runtime.budget import NoDraft, Policy, Static, Threshold
from dspark_trt.runtime.executor_onnxruntime import Verdict, VerifyStep
from dspark_trt.runtime.llm import LLM, SamplingParams


@contextmanager
def watched_steps(llm: LLM) -> Iterator[list[VerifyStep]]:
    """Collects what each verify step is told."""
    steps: list[VerifyStep] = []
    original = llm.executor.verify

    def verify(step: VerifyStep, **kwargs: Any) -> Verdict:
        steps.append(step)
        return original(step, **kwargs)

    llm.executor.verify = verify  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del llm.executor.verify


POLICIES: list[Policy] = [NoDraft(), Static(), Static(2), Threshold(0.0), Threshold(0.6)]


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7, 19])
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_stay_below_the_bound_and_the_text_stays(llm: LLM, rows: int, mixed: bool) -> None:
    expected = texts(llm.generate(PROMPTS, GREEDY))
    batcher = llm.engine.batcher
    usual, batcher.max_num_tokens, batcher.mixed = batcher.max_num_tokens, rows, mixed
    try:
        for policy in POLICIES:
            llm.engine.policy = policy
            with watched_steps(llm) as steps:
                done = llm.generate(PROMPTS, GREEDY)
            assert texts(done) == expected
            assert max(len(step.layout.tokens_in) for step in steps) <= rows
            drafted = [step for step in steps if step.drafts is not None]
            assert bool(drafted) == (rows > 1 and not isinstance(policy, NoDraft))
    finally:
        batcher.max_num_tokens, batcher.mixed = usual, False


def test_the_bound_holds_for_an_engine_built_with_it(pair_engine: Path, tmp_path: Path) -> None:
    from tiny_engine import tiny_engine

    root = pair_engine.parent
    target, drafter = root / "markov-llama-target", root / "markov-llama-drafter"
    small = LLM(tiny_engine(tmp_path / "engine", target, drafter, max_num_tokens=6), threads=1)
    with watched_steps(small) as steps:
        done = small.generate(PROMPTS, GREEDY)
    assert max(len(step.layout.tokens_in) for step in steps) == 6
    assert texts(done) == texts(LLM(pair_engine, threads=1).generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_nobody_starves(llm: LLM, rows: int) -> None:
    """With fewer rows than requests, they decode in turn: never two steps ahead of another."""
    batcher = llm.engine.batcher
    requests = [submit(llm, ids(1, i), max_tokens=30, ignore_eos=True) for i in range(4)]
    llm.engine.policy = NoDraft()
    llm.engine.step()  # all prompts
    usual, batcher.max_num_tokens = batcher.max_num_tokens, rows
    try:
        for _ in range(35):
            assert len(llm.engine.step()) == rows
            lengths = [len(r.output_ids) for r in requests]
            assert max(lengths) - min(lengths) <= 1
    finally:
        batcher.max_num_tokens = usual
    drain(llm)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_short_of_pages_and_of_rows_every_step_does_something(pair_engine: Path, rows: int) -> None:
    """The youngest gives its pages back also where it was to decode, or had its turn already."""
    scarce = LLM(pair_engine, threads=1, kv_pages=13)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    prompts = [ids(4, i) for i in range(4)]
    expected = texts(LLM(pair_engine, threads=1).generate(prompts, params))
    scarce.engine.batcher.max_num_tokens = rows
    requests = [submit(scarce, p, max_tokens=60, ignore_eos=True) for p in prompts]
    while not scarce.engine.batcher.idle:
        before = scarce.engine.metrics.steps
        scarce.engine.step()
        assert scarce.engine.metrics.steps == before + 1
    assert scarce.engine.batcher.preemptions > 0
    assert [r.output_ids for r in requests] == expected
    assert scarce.pool.num_free == scarce.pool.capacity == 13
