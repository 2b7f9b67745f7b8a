"""Decoding with and without a drafter, from the references: every step recomputes everything.

The round: draft a block after the history; choose its length l; run the target on the history and
l drafts; verify; commit. The token that the prompt alone gives is no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from reference.drafter import DraftBlock, ReferenceDrafter
from reference.law import Law, draft_law, inverse_cdf, target_law, verify_block

# (step ordinal, stream, k) -> a number in [0, 1). Streams: draft and accept with k = 1..G, recover
# and bonus with k = 0. Ordinal 0 is the prompt's own token (bonus); steps count from 1.
Uniforms = Callable[[int, str, int], float]


@dataclass(frozen=True)
class Step:
    """One verification step."""

    history: list[int]  # prompt and output before the step, the anchor last
    draft: DraftBlock
    length: int  # l, drafts sent to verification
    committed: list[int]  # accepted drafts and one more: 1 .. l + 1

    @property
    def accepted(self) -> int:
        """Drafts accepted, without the last token."""
        return len(self.committed) - 1


def random_uniforms(seed: int) -> Uniforms:
    """A stream of fresh numbers that ignores its key."""
    generator = np.random.default_rng(seed)
    return lambda step, stream, k: float(generator.random())


def target_rows(
    target: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    drafts: Sequence[int],
    params: dict[str, Any],
) -> list[Law]:
    """Laws of the tokens after [history], [history, x_1], .. [history, x_1 .. x_l]: l + 1 of them.

    `params` are `target_law`'s, without prompt_ids and output_ids.
    """
    ids = [*prompt_ids, *output_ids, *drafts]
    with torch.no_grad():
        logits = target(input_ids=torch.tensor([ids])).logits[0].double().numpy()
    return [
        target_law(
            logits[len(ids) - len(drafts) - 1 + k],
            prompt_ids=prompt_ids,
            output_ids=[*output_ids, *drafts[:k]],
            **params,
        )
        for k in range(len(drafts) + 1)
    ]


def decode_plain(
    target: Any,
    prompt_ids: Sequence[int],
    *,
    n: int,
    params: dict[str, Any],
    uniforms: Uniforms | None = None,
) -> list[int]:
    """`n` tokens without a drafter; at temperature 0 no uniforms are needed."""
    draw = uniforms or (lambda step, stream, k: 0.0)
    output: list[int] = []
    for step in range(n):
        (law,) = target_rows(target, prompt_ids, output, (), params)
        output.append(inverse_cdf(law, draw(step, "bonus", 0)))
    return output


def decode_speculative(
    target: Any,
    drafter: ReferenceDrafter,
    prompt_ids: Sequence[int],
    *,
    steps: int,
    params: dict[str, Any],
    draft_temperature: float | None = None,
    uniforms: Uniforms | None = None,
    block_size: int | None = None,
    length: Callable[[DraftBlock], int] | None = None,
) -> list[Step]:
    """`steps` steps after the prompt's own token; `draft_temperature` defaults to the target's.

    The output is `[steps[0].history[-1]] + all committed`. `length` chooses l (default: all G).
    """
    draw = uniforms or (lambda step, stream, k: 0.0)
    size = block_size or drafter.block_size
    heat = params.get("temperature", 1.0) if draft_temperature is None else draft_temperature
    (law,) = target_rows(target, prompt_ids, (), (), params)
    output = [inverse_cdf(law, draw(0, "bonus", 0))]
    done: list[Step] = []
    for step in range(1, steps + 1):
        history = [*prompt_ids, *output]
        numbers = [draw(step, "draft", k) for k in range(1, size + 1)]
        block = drafter.draft(history, temperature=heat, uniforms=numbers, block_size=size)
        l = size if length is None else length(block)  # noqa: E741
        drafts = block.tokens[:l]
        committed = verify_block(
            target_rows(target, prompt_ids, output, drafts, params),
            [draft_law(row.double().numpy(), heat) for row in block.logits[:l]],
            drafts,
            [draw(step, "accept", k) for k in range(1, l + 1)],
            draw(step, "recover", 0),
            draw(step, "bonus", 0),
        )
        done.append(Step(history=history, draft=block, length=l, committed=committed))
        output = output + committed
    return done


def acceptance(steps: Sequence[Step]) -> float:
    """Accepted drafts over drafts tested: the chance of a draft whose predecessors all passed."""
    tested = sum(min(step.accepted + 1, step.length) for step in steps)
    return sum(step.accepted for step in steps) / tested
