"""What a request asked to keep of the step's logits: logprobs, context and generation logits.

Log-probabilities are those of the model itself, log softmax of the raw logits: before bias,
penalties, bans, temperature and filters, so they mean the same under every sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark_trt.runtime.batcher import ScheduledStep
from dspark_trt.runtime.executor_onnxruntime import Verdict
from dspark_trt.runtime.request import Request, TokenLogprobs


class LogitRows:
    """Finds the rows of a step's logits that belong to each sequence."""

    def __init__(self, plan: ScheduledStep, verdict: Verdict) -> None:
        self._logits = verdict.logits
        if verdict.logits is None:
            return
        self._chunk_rows: list[tuple[int, int]] = []
        row = 0
        for chunk in plan.chunks:
            asked = 0
            if chunk.request.keep_context_logits and not chunk.request.output_ids:
                asked = chunk.end - chunk.start
            elif chunk.emits:
                asked = 1
            self._chunk_rows.append((row, row + asked))
            row += asked
        starts = row + np.concatenate([[0], np.cumsum(verdict.lengths[:-1] + 1)])
        self._starts = starts.astype(int)

    def keep_context(self, chunk: int, request: Request) -> None:
        """Append the chunk's rows to the request's context logits, where it keeps them."""
        if self._logits is not None and request.keep_context_logits and not request.output_ids:
            start, end = self._chunk_rows[chunk]
            request.context_logits.append(self._logits[start:end].copy())

    def of(
        self, sequence: int, request: Request, tokens: Sequence[int]
    ) -> list[TokenLogprobs] | None:
        """The log-probabilities of the tokens a sequence gained; keeps generation logits too."""
        if self._logits is None:
            return None
        if sequence < len(self._chunk_rows):
            first = self._chunk_rows[sequence][1] - 1
        else:
            first = self._starts[sequence - len(self._chunk_rows)]
        rows = self._logits[first : first + len(tokens)]
        if request.generation_logits is not None:
            request.generation_logits.append(rows.copy())
        if request.logprobs is None:
            return None
        assert request.params.logprobs is not None
        return [
            token_logprobs(row, token, request.params.logprobs)
            for row, token in zip(rows, tokens, strict=True)
        ]


def token_logprobs(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """Of one row [V]: the token's own log-probability and the `top` likeliest, ties lowest id."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    law = wide - (peak + np.log(np.exp(wide - peak).sum()))
    best: tuple[tuple[int, float], ...] = ()
    top = min(top, len(law))
    if top:
        edge = np.partition(law, -top)[-top]
        ids = np.flatnonzero(law >= edge)
        ids = ids[np.argsort(-law[ids], kind="stable")][:top]
        best = tuple((int(i), float(law[i])) for i in ids)
    return TokenLogprobs(token, float(law[token]), best)
