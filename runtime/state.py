"""Per-slot state of the step loop: what the graphs read and update in place.

A slot is a row of every array here. The host fills it when a request joins and never needs to read
`last_token`, `kv_len` or `output_counts` back: the verify graph's Commit moves them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_trt.runtime.kv_cache import BLANK_PAGE
from dspark_trt.runtime.request import Request
from dspark_trt.runtime.sampling import penalty_counts


class StepState:
    """Host-visible arrays [S, ...], by the names of the graphs' inputs."""

    # Updated by the verify graph; its outputs `<name>.out` are the same buffers.
    IN_PLACE = ("last_token", "kv_len", "output_counts")

    def __init__(self, *, slots: int, max_pages: int, vocab_size: int) -> None:
        f32, i32 = np.float32, np.int32
        self.vocab_size = vocab_size
        self.arrays: dict[str, np.ndarray] = {
            "last_token": np.zeros(slots, i32),
            "kv_len": np.zeros(slots, i32),
            "page_table": np.full((slots, max_pages), BLANK_PAGE, i32),
            "temperature": np.zeros(slots, f32),
            "draft_temperature": np.zeros(slots, f32),
            "top_k": np.zeros(slots, i32),
            "top_p": np.ones(slots, f32),
            "min_p": np.zeros(slots, f32),
            "repetition_penalty": np.ones(slots, f32),
            "presence_penalty": np.zeros(slots, f32),
            "frequency_penalty": np.zeros(slots, f32),
            "penalty_prompt": np.zeros(slots, i32),
            "bias_on": np.zeros(slots, i32),
            "prompt_counts": np.zeros((slots, vocab_size), i32),
            "output_counts": np.zeros((slots, vocab_size), i32),
            "bias": np.zeros((slots, vocab_size), f32),
        }

    def join(self, slot: int, request: Request) -> None:
        """Fill a slot for a request whose cache is empty."""
        a, p = self.arrays, request.params
        a["kv_len"][slot] = 0
        a["last_token"][slot] = request.output_ids[-1] if request.output_ids else 0
        a["page_table"][slot] = BLANK_PAGE
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty", "penalty_prompt"):  # fmt: skip
            a[name][slot] = getattr(p, name)
        a["draft_temperature"][slot] = p.law_of_drafts
        a["top_k"][slot] = min(p.top_k, self.vocab_size)
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0):
            a["prompt_counts"][slot] = penalty_counts(request.prompt_ids, self.vocab_size)
            a["output_counts"][slot] = penalty_counts(request.output_ids, self.vocab_size)
        if a["bias_on"][slot]:  # the last request's; a batch mate's bias adds every slot's row
            a["bias"][slot] = 0
        a["bias_on"][slot] = bool(p.logit_bias)
        for token, value in (p.logit_bias or {}).items():
            a["bias"][slot, token] = value

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self.arrays["page_table"][slot, : len(pages)] = pages
