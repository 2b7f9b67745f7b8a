"""Stands between an engine and its draft graph: records drafts, and puts others in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dspark_trt.runtime.executor_onnxruntime import Drafts
from dspark_trt.runtime.llm import LLM
from dspark_trt.runtime.request import Request

Steer = Callable[[Request, np.ndarray], np.ndarray]  # a request's drafts [G] -> those to verify


@dataclass(frozen=True)
class Block:
    """A recorded draft of one request."""

    history: list[int]  # prompt and output, the anchor last
    uniforms: np.ndarray  # [G]
    temperature: float  # of the draft
    tokens: np.ndarray  # [G]
    logits: np.ndarray  # [G, V]
    conf_logits: np.ndarray  # [G]


class Recorder:
    """In place of `executor.draft`: notes the graph's drafts, hands on what `steer` makes of them.

    Steered drafts are no draw from their logits, so they keep the text only at temperature 0.
    """

    def __init__(self, llm: LLM, steer: Steer = lambda request, tokens: tokens) -> None:
        self.blocks: list[Block] = []
        self._batcher, self._draft, self._steer = llm.engine.batcher, llm.executor.draft, steer
        llm.executor.draft = self  # type: ignore[method-assign,assignment]

    def __call__(self, slots: np.ndarray, u_draft: np.ndarray) -> Drafts:
        drafts = self._draft(slots, u_draft)
        logits, tokens = drafts.logits.numpy().copy(), drafts.tokens.copy()
        by_slot = {r.slot: r for r in self._batcher.running}
        for i, slot in enumerate(slots.tolist()):
            request = by_slot[slot]
            self.blocks.append(
                Block(
                    history=request.prompt_ids + request.output_ids,
                    uniforms=u_draft[i].copy(),
                    temperature=request.params.law_of_drafts,
                    tokens=drafts.tokens[i].copy(),
                    logits=logits[i],
                    conf_logits=drafts.conf_logits[i].copy(),
                )
            )
            tokens[i] = self._steer(request, tokens[i])
        return replace(drafts, tokens=tokens)

    def remove(self, llm: LLM) -> None:
        """Take the recorder out again."""
        llm.executor.draft = self._draft  # type: ignore[method-assign]


def knowing(
    texts: dict[tuple[int, ...], Sequence[int]], accepted: Callable[[Request], int]
) -> Steer:
    """Drafts whose first `accepted(request)` tokens are right, by the known greedy `texts`.

    `texts` maps prompt ids to their greedy continuation; later drafts stay the graph's own.
    """

    def steer(request: Request, tokens: np.ndarray) -> np.ndarray:
        known = texts[tuple(request.prompt_ids)][len(request.output_ids) :]
        right = list(known[: min(accepted(request), len(tokens))])
        return np.array([*right, *tokens[len(right) :]], tokens.dtype)

    return steer
