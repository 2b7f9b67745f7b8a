"""Does an engine's text have the law that it should have? Thousands of texts, one chi-square.

The law is enumerated from Transformers' logits of every prefix by `reference.law`. Seeds are fixed,
so a verdict never changes from run to run on one machine; elsewhere rounding may move a text, which
the bound allows for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from reference.law import JointLaw, Law, Tokens, plain_law, target_law

from dspark_trt.runtime.budget import Policy, Static
from dspark_trt.runtime.llm import LLM, Completion, SamplingParams

BOUND = 1e-4  # smallest p that passes
MERGED = 5.0  # cells expected less often than this are one cell


class TargetLaws:
    """Laws of the next token after a prompt and an output, from a Transformers model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._rows: dict[Tokens, np.ndarray] = {}

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[V] after the text `ids`."""
        key = tuple(ids)
        if key not in self._rows:
            rows = self.model(input_ids=torch.tensor([key])).logits[0].double().numpy()
            self._rows |= {key[: i + 1]: row for i, row in enumerate(rows)}
        return self._rows[key]

    def law(
        self, prompt: Sequence[int], output: Tokens, params: SamplingParams, ends: Sequence[int]
    ) -> Law:
        """After `output`, under `params`; `ends` are the ids that min_tokens forbids."""
        banned = {w[-1] for w in params.bad_words if self._follows(w, [*prompt, *output])}
        if len(output) < params.min_tokens:
            banned |= {*ends, *params.stop_token_ids}
        return target_law(
            self.logits([*prompt, *output]),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=float(np.float32(params.top_p)),
            min_p=float(np.float32(params.min_p)),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            penalty_prompt=params.penalty_prompt,
            prompt_ids=prompt,
            output_ids=output,
            bias=dict(params.logit_bias or {}),
            banned=banned,
        )

    @staticmethod
    def _follows(word: Any, ids: list[int]) -> bool:
        head = list(word[:-1])
        return not head or ids[-len(head) :] == head

    def joint(
        self, prompt: Sequence[int], params: SamplingParams, *, n: int, ends: Sequence[int] = ()
    ) -> JointLaw:
        """The law of the first `n` tokens of plain decoding that nothing ends."""
        return plain_law(lambda output: self.law(prompt, output, params, ends), n=n)


def sample(
    llm: LLM,
    prompt: Sequence[int],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    count: int,
    policy: Policy | None = None,
    first_seed: int = 0,
) -> list[Completion]:
    """`count` texts with seeds of their own; several params take turns in one batch."""
    llm.engine.policy = policy or Static()
    each = [params] if isinstance(params, SamplingParams) else list(params)
    asked = [replace(each[i % len(each)], seed=first_seed + i) for i in range(count)]
    return llm.generate([list(prompt)] * count, asked)


def p_value(outcomes: Iterable[Any], law: dict[Any, float]) -> float:
    """The chance of a chi-square at least as large where `outcomes` follow `law`.

    An outcome that the law does not have is impossible: 0.
    """
    counts = Counter(outcomes)
    total = sum(counts.values())
    assert abs(sum(law.values()) - 1) < 1e-9
    if any(law.get(key, 0.0) == 0 for key in counts):
        return 0.0
    cells = [(total * chance, counts[key]) for key, chance in law.items()]
    large = [cell for cell in cells if cell[0] >= MERGED]
    small = [cell for cell in cells if cell[0] < MERGED]
    rest = (sum(e for e, _ in small), sum(c for _, c in small))
    if rest[0] > 0:
        large.append(rest)
    assert len(large) > 1, "a law of one outcome needs no statistic"
    statistic = sum((count - mean) ** 2 / mean for mean, count in large)
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def heads(texts: Iterable[Completion], n: int) -> list[Tokens]:
    """The first `n` tokens of each text."""
    return [tuple(text.token_ids[:n]) for text in texts]
