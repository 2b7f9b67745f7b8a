"""Drafts of a Markov pair are accepted often, not always, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import load_target
from markov_pair import markov_pair
from reference.decode import Step, acceptance, decode_plain, decode_speculative, random_uniforms
from reference.drafter import ReferenceDrafter

torch.set_num_threads(1)


def run(folder: Path, temperature: float, **options: object) -> list[list[Step]]:
    """Steps of four short prompts."""
    target_dir, drafter_dir = markov_pair(folder, **options)  # type: ignore[arg-type]
    target = load_target(target_dir)
    drafter = ReferenceDrafter(drafter_dir, target)
    prompts = torch.randint(2, target.config.vocab_size, (4, 8))
    return [
        decode_speculative(
            target,
            drafter,
            prompt,
            steps=9,
            params={"temperature": temperature},
            uniforms=random_uniforms(seed),
        )
        for seed, prompt in enumerate(prompts.tolist())
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", [{}, {"vocab": 256, "family": "qwen3"}, {"head": "gated", "seed": 5}]
)
def test_acceptance_is_between_30_and_90_percent(
    tmp_path: Path, temperature: float, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    rate = acceptance([step for steps in run(tmp_path, temperature, **options) for step in steps])
    assert 0.3 < rate < 0.9


def test_every_accepted_count_occurs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert {step.accepted for steps in run(tmp_path, 1.0) for step in steps} == {0, 1, 2, 3, 4}


def test_greedy_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target_dir, _ = markov_pair(tmp_path / "plain")
    target = load_target(target_dir)
    for steps in run(tmp_path / "drafted", 0.0):
        prompt, first = steps[0].history[:-1], steps[0].history[-1]
        output = [first] + [token for step in steps for token in step.committed]
        params = {"temperature": 0.0}
        assert output == decode_plain(target, prompt, n=len(output), params=params)
        assert len(set(output)) > 5  # no short cycle
