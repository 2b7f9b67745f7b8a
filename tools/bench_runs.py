"""Measuring: arms (ours with and without drafts, other runtimes) in interleaved repeats.

Each round runs every arm once over all prompts, forwards and backwards in turn, so that a drift of
the machine meets all of them alike. Decode speed leaves out each answer's first token, which comes
from prefill, and counts an end token, which a step was spent on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dspark_trt.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dspark_trt.runtime.budget import Policy
    from dspark_trt.runtime.llm import LLM, Completion

WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run of one arm over all prompts took; seconds, and counts of tokens or steps."""

    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    decode_steps: int = 0
    draft_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0  # of decode steps, outside both graphs
    request_steps: int = 0  # decode steps summed over requests
    mean_accepted_length: float = 1.0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an arm answered to one prompt; ids where the runtime gives them."""

    text: str
    token_ids: list[int] | None


class Arm(Protocol):
    """One way to decode the prompts; `batch_size` of them at once."""

    name: str
    batch_size: int

    def warm_up(self) -> None:
        """Run a few tokens, untimed."""

    def run(self) -> tuple[Sample, list[Answer]]:
        """Run all prompts once."""


@dataclass(frozen=True, slots=True)
class ArmResult:
    """An arm's samples, one per round, and its answers of the first round."""

    name: str
    batch_size: int
    samples: list[Sample]
    answers: list[Answer]


@dataclass(slots=True)
class EngineArm:
    """This engine under one policy, greedy; prompts in groups of `batch_size`."""

    name: str
    batch_size: int
    llm: LLM
    policy: Policy
    prompts: Sequence[list[int]]
    max_tokens: int
    ignore_eos: bool = False

    def warm_up(self) -> None:
        self._generate(min(WARM_UP_TOKENS, self.max_tokens), self.prompts[: self.batch_size])

    def run(self) -> tuple[Sample, list[Answer]]:
        metrics = self.llm.engine.metrics
        metrics.reset()
        done: list[Completion] = []
        for start in range(0, len(self.prompts), self.batch_size):
            group = self.prompts[start : start + self.batch_size]
            done += self._generate(self.max_tokens, group)
        sample = Sample(
            prefill_tokens=metrics.prefill_tokens,
            prefill_seconds=metrics.prefill_seconds,
            decode_tokens=sum(
                decoded(len(c.token_ids), stopped=c.finish_reason == "stop") for c in done
            ),
            decode_seconds=metrics.decode_seconds,
            decode_steps=metrics.decode_steps,
            draft_steps=metrics.draft_steps,
            draft_seconds=metrics.draft_seconds,
            verify_seconds=metrics.verify_seconds,
            host_seconds=metrics.host_seconds,
            request_steps=metrics.requests_steps,
            mean_accepted_length=metrics.mean_accepted_length,
            verified_by_position=metrics.verified_by_position.tolist(),
            accepted_by_position=metrics.accepted_by_position.tolist(),
        )
        return sample, [Answer(c.text, c.token_ids) for c in done]

    def _generate(self, max_tokens: int, prompts: Sequence[list[int]]) -> list[Completion]:
        self.llm.engine.policy = self.policy
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=self.ignore_eos)
        return self.llm.generate(list(prompts), params)


def decoded(kept: int, *, stopped: bool) -> int:
    """Tokens that decode steps drew for an answer of `kept` tokens, an end token with them."""
    return max(kept + stopped - 1, 0)


def measure(
    arms: Sequence[Arm],
    repeat: int,
    begins: Callable[[str], object] = lambda name: None,
    ends: Callable[[], object] = lambda: None,
) -> list[ArmResult]:
    """Run every arm `repeat` times, interleaved; `begins` and `ends` are called around each run."""
    results = [ArmResult(arm.name, arm.batch_size, [], []) for arm in arms]
    for arm in arms:
        arm.warm_up()
    for round_ in range(repeat):
        order = list(zip(arms, results))
        for arm, result in order if round_ % 2 == 0 else order[::-1]:
            begins(f"{arm.name} x{arm.batch_size}")
            sample, answers = arm.run()
            ends()
            result.samples.append(sample)
            if round_ == 0:
                result.answers.extend(answers)
    return results
