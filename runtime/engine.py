"""The step loop.

1. schedule   which chunks to prefill, which requests decode              batcher.py
2. budget     K, how many drafts this step verifies; 0 = do not draft     budget.py
3. draft      tokens, their logits and confidences                        draft graph
4. verify     K/V written, drafts judged, state committed                 verify graph
5. commit     the host appends tokens, ends requests, frees their pages   request.py

A step that fails, or is interrupted, may have moved the device's state and not the host's. So every
request that it worked on ends with "error" and gives slot and pages back; all others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np

from dspark_trt.runtime.batcher import Batcher, ScheduledStep, context_ids
from dspark_trt.runtime.budget import BudgetView, Policy, asked_budget, asked_lengths
from dspark_trt.runtime.confidence import probabilities
from dspark_trt.runtime.executor_onnxruntime import (
    Drafts,
    OnnxRuntimeExecutor,
    Verdict,
    VerifyStep,
)
from dspark_trt.runtime.logprobs import LogitRows
from dspark_trt.runtime.metrics import Metrics
from dspark_trt.runtime.ragged import Chunk, pack_step
from dspark_trt.runtime.request import FinishReason, Request
from dspark_trt.runtime.sampling import Uniforms, draw_uniforms, row_edits


class Engine:
    """Moves requests from prompt to text, one step at a time; synchronous, one thread."""

    def __init__(self, executor: OnnxRuntimeExecutor, batcher: Batcher, policy: Policy) -> None:
        self.executor = executor
        self.batcher = batcher
        self.policy = policy
        self.block_size = executor.block_size
        self.metrics = Metrics(executor.block_size)
        self._step = 0
        # Of the last drafts: (step, confidence logits [B, G]).
        self._conf_logits: deque[tuple[int, np.ndarray]] = deque(maxlen=3)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` where it can never run."""
        self.batcher.add(request)

    def cancel(self, request: Request) -> None:
        """End a request between two steps; its slot and pages are free at once."""
        self._end([request], "cancelled")

    def step(self) -> list[Request]:
        """Run one step; gives the requests that gained tokens or ended.

        Whatever is raised in it comes through, after the step's requests have ended with "error".
        """
        started = time.perf_counter()
        plan = ScheduledStep()
        try:
            self.batcher.schedule(plan)
            if plan.empty:
                return []
            self._step += 1
            self._fill_slots(plan)
            drafts, verdict = self._run(plan)
            touched = self._commit(plan, verdict)
        except BaseException:
            self._end(plan.requests, "error")
            raise
        self._count(plan, drafts, verdict, time.perf_counter() - started)
        return touched

    def _end(self, requests: Iterable[Request], reason: FinishReason) -> None:
        """Release and finish them all, also where the finish of one raises."""
        with ExitStack() as all_of_them:
            for request in requests:
                all_of_them.callback(request.finish, reason)
                all_of_them.callback(self.batcher.release, request)  # the last one is called first

    def _fill_slots(self, plan: ScheduledStep) -> None:
        state = self.executor.state
        for request in plan.joined:
            assert request.slot is not None
            state.join(request.slot, request)
        for request in [*plan.joined, *plan.grown]:
            assert request.slot is not None
            state.set_pages(request.slot, request.pages)

    def _run(self, plan: ScheduledStep) -> tuple[Drafts | None, Verdict]:
        """Draft and verify."""
        uniforms = self._uniforms(plan)
        drafts, caps, budget = self._draft(plan, uniforms)
        chunks = [
            Chunk(
                slot=c.request.slot,  # type: ignore[arg-type]
                token_ids=context_ids(c.request, c.start, c.end),
                emits=c.emits,
                all_logits=c.request.keep_context_logits and not c.request.output_ids,
            )
            for c in plan.chunks
        ]
        layout = pack_step(chunks, [r.slot for r in plan.decode], budget)  # type: ignore[misc]
        step = VerifyStep(
            layout=layout,
            edits=row_edits(
                [*(c.request for c in plan.chunks), *plan.decode],
                None if drafts is None else self._with_chunks(drafts.tokens, len(chunks)),
                0,
            ),
            u_extra=uniforms.extra,
            drafts=drafts,
            u_accept=uniforms.accept[len(chunks) :],
            caps=caps,
            budget=budget,
        )
        want_logits = any(
            r.logprobs is not None or r.keep_context_logits or r.generation_logits is not None
            for r in [*(c.request for c in plan.chunks), *plan.decode]
        )
        return drafts, self.executor.verify(step, want_logits=want_logits)

    @staticmethod
    def _with_chunks(tokens: np.ndarray, chunks: int) -> np.ndarray:
        """Draft tokens [B, G] as [R, G]: chunks have none that count."""
        return np.concatenate([np.zeros((chunks, tokens.shape[1]), tokens.dtype), tokens])

    def _uniforms(self, plan: ScheduledStep) -> Uniforms:
        requests = [*(c.request for c in plan.chunks), *plan.decode]
        if all(r.params.temperature == 0 for r in requests):
            count, g = len(requests), self.block_size
            zeros = np.zeros((count, g), np.float32)
            return Uniforms(zeros, zeros, np.zeros((count, 2), np.float32))
        keys = np.array([r.key for r in requests], np.uint64)
        drawn = draw_uniforms(keys, np.array([r.step for r in requests]), self.block_size)
        parts = (drawn.draft, drawn.accept, drawn.extra)
        return Uniforms(*(np.ascontiguousarray(part) for part in parts))

    def _draft(
        self, plan: ScheduledStep, uniforms: Uniforms
    ) -> tuple[Drafts | None, np.ndarray | None, int]:
        """Drafts, bounds of the lengths [B], and K; all rows are at most max_num_tokens."""
        if not plan.decode or not self.block_size:
            return None, None, 0
        room = np.array([self._room(r) for r in plan.decode], np.int32)
        view = BudgetView(room.copy(), self._lagged_conf_logits(), self.executor.sts)
        rows_left = self.batcher.max_num_tokens - plan.rows
        budget = min(asked_budget(self.policy, view), int(room.sum()), rows_left)
        if budget <= 0:
            return None, None, 0
        slots = np.array([r.slot for r in plan.decode], np.int32)
        drafts = self.executor.draft(slots, uniforms.draft[len(plan.chunks) :])
        self._conf_logits.append((self._step, drafts.conf_logits))
        caps = room
        if self.policy.synchronous:
            conf = probabilities(drafts.conf_logits, self.executor.sts)
            caps = asked_lengths(self.policy, conf, room)
            budget = min(int(caps.sum()), rows_left)
        return drafts, caps, budget

    def _lagged_conf_logits(self) -> np.ndarray | None:
        """What a budget may see: the latest confidences that are two steps old or older."""
        return next((c for step, c in reversed(self._conf_logits) if step <= self._step - 2), None)

    def _room(self, request: Request) -> int:
        """Drafts worth verifying: with the extra token no more than the request may still emit."""
        longest = min(self.block_size, self.policy.max_length or self.block_size)
        return max(min(longest, request.max_tokens - len(request.output_ids) - 1), 0)

    def _commit(self, plan: ScheduledStep, verdict: Verdict) -> list[Request]:
        touched: list[Request] = []
        rows = LogitRows(plan, verdict)
        for i, chunk in enumerate(plan.chunks):
            request = chunk.request
            request.kv_len = chunk.end
            rows.keep_context(i, request)
            if chunk.emits:
                touched.append(request)
        sequences = [c.request for c in plan.chunks] + plan.decode
        for i, request in enumerate(sequences):
            count = int(verdict.n_out[i])
            if count == 0:
                continue
            tokens = verdict.out_tokens[i, :count].tolist()
            if i >= len(plan.chunks):
                request.kv_len += count
                touched.append(request)
            request.commit(tokens, rows.of(i, request, tokens))
            if request.finished:
                self.batcher.release(request)
        return touched

    def _count(
        self,
        plan: ScheduledStep,
        drafts: Drafts | None,
        verdict: Verdict,
        seconds: float,
    ) -> None:
        m = self.metrics
        m.steps += 1
        if plan.chunks:
            m.prefill_seconds += seconds
            m.prefill_tokens += sum(c.end - c.start for c in plan.chunks)
        else:
            m.decode_steps += 1
            m.decode_seconds += seconds
            m.verify_seconds += verdict.seconds
            if drafts is not None:
                m.draft_seconds += drafts.seconds
                m.draft_steps += 1
        if plan.decode:
            gained = verdict.n_out[len(plan.chunks) :]
            m.count_verification(verdict.lengths, gained, drafted=drafts is not None)
