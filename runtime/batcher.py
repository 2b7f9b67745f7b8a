"""Which requests a step works on: admission, chunked prefill, page grants, preemption.

Waiting requests are admitted in order of arrival while a slot is free and the pool can hold their
context and the first steps. A step runs prefill chunks or decodes those that are past prefill; a
backend that gains from mixing does both at once (`mixed`). It has at most `max_num_tokens` rows, a
request that decodes one of them (its drafts share what is left: engine.py); where those do not
suffice for all, the requests that decoded longest ago come first. Pages are
granted `lookahead` tokens ahead of what a request has; where the pool is empty the youngest request
gives its pages back and is computed again later (its tokens, logprobs and step ordinal stay).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from dspark_trt.runtime.kv_cache import PagePool
from dspark_trt.runtime.request import Request, Status
from dspark_trt.runtime.sampling_params import RequestError


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, end) of a request's context."""

    request: Request
    start: int
    end: int

    @property
    def emits(self) -> bool:
        """Whether its last row draws the request's first token (not when it is computed again)."""
        return self.end == context_len(self.request) and not self.request.output_ids


@dataclass(slots=True)
class ScheduledStep:
    """One step's work, chunks first as in the graphs."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    joined: list[Request] = field(default_factory=list)  # their slots are to be filled
    grown: list[Request] = field(default_factory=list)  # their page tables have changed

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.decode

    @property
    def rows(self) -> int:
        """Rows without drafts: of the chunks, and one per decoding request."""
        return sum(c.end - c.start for c in self.chunks) + len(self.decode)

    @property
    def requests(self) -> set[Request]:
        """All whose slots the step fills, reads or moves."""
        return {*(c.request for c in self.chunks), *self.decode, *self.joined, *self.grown}


def context_len(request: Request) -> int:
    """Tokens whose K/V must be there before the request decodes: all but the newest one drawn."""
    return len(request.prompt_ids) + max(len(request.output_ids) - 1, 0)


def context_ids(request: Request, start: int, end: int) -> list[int]:
    """Tokens [start, end) of prompt and output."""
    prompt = len(request.prompt_ids)
    if end <= prompt:
        return request.prompt_ids[start:end]
    own = request.output_ids[max(start - prompt, 0) : end - prompt]
    return request.prompt_ids[start:] + own


class Batcher:
    """Waiting and running requests; owns their slots, pages and kv_len."""

    def __init__(
        self,
        pool: PagePool,
        *,
        num_slots: int,
        max_num_tokens: int,
        lookahead: int,
        mixed: bool = False,
    ) -> None:
        self.pool = pool
        self.max_num_tokens = max_num_tokens
        self.lookahead = lookahead
        self.mixed = mixed
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self.preemptions = 0
        self._slots = list(range(num_slots - 1, -1, -1))
        self._turns = count()
        self._turn = [0] * num_slots  # of each slot's request, when it decoded last, or joined

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request; `RequestError` where the whole pool could not hold it."""
        if not request.finished:
            self.check(request)
            self.waiting.append(request)

    def check(self, request: Request) -> None:
        """Raise `RequestError` where the whole pool could not hold the request."""
        need = self.pool.pages_for(len(request.prompt_ids) + request.max_tokens)
        if need > self.pool.capacity:
            raise RequestError(
                f"prompt and max_tokens need {need} KV pages of {self.pool.page_size} tokens, the "
                f"cache has {self.pool.capacity}: lower max_tokens, or load the engine with more "
                "pages"
            )

    def schedule(self, step: ScheduledStep | None = None) -> ScheduledStep:
        """The next step's work, put into `step` as it is found; empty where nothing is to do."""
        step = ScheduledStep() if step is None else step
        self._admit(step)
        budget = self.max_num_tokens
        for request in self.running:
            missing = context_len(request) - request.kv_len
            if missing > 0 and budget > 0:
                end = request.kv_len + min(missing, budget)
                step.chunks.append(ScheduledChunk(request, request.kv_len, end))
                budget -= end - request.kv_len
        if self.mixed or not step.chunks:
            self._decode(step, budget)
        return step

    def release(self, request: Request) -> None:
        """Take a request's slot and pages back, wherever it stands."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            self._give_back(request)

    def _admit(self, step: ScheduledStep) -> None:
        while self.waiting and self._slots:
            request = self.waiting[0]
            tokens = min(context_len(request) + self.lookahead, self._most(request))
            if not self.pool.can_grow(request.pages, tokens):
                return
            step.joined.append(request)  # first, so that a failed step knows of it
            self.running.append(request)
            self.waiting.popleft()
            self.pool.grow(request.pages, tokens)
            request.slot = self._slots.pop()
            request.status = Status.RUNNING
            self._turn[request.slot] = next(self._turns)

    def _decode(self, step: ScheduledStep, rows: int) -> None:
        ready = [r for r in self.running if r.kv_len >= context_len(r)]
        if len(ready) > rows:
            ready.sort(key=lambda r: self._turn[r.slot])  # type: ignore[index]
        for request in ready:
            if len(step.decode) == rows:
                return
            if request.slot is not None and self._granted(request, step):
                step.decode.append(request)
                self._turn[request.slot] = next(self._turns)

    def _granted(self, request: Request, step: ScheduledStep) -> bool:
        """Make room for the next steps of `request`, at the cost of younger ones, then itself."""
        tokens = min(request.kv_len + self.lookahead, self._most(request))
        while not self.pool.can_grow(request.pages, tokens):
            youngest = self.running[-1]
            self._preempt(youngest, step)
            if youngest is request:
                return False
        if self.pool.grow(request.pages, tokens):
            step.grown.append(request)
        return True

    def _preempt(self, request: Request, step: ScheduledStep) -> None:
        self.preemptions += 1
        step.chunks = [c for c in step.chunks if c.request is not request]
        for listed in (step.decode, step.joined, step.grown):
            if request in listed:
                listed.remove(request)
        self.running.remove(request)
        self._give_back(request)
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def _give_back(self, request: Request) -> None:
        if request.slot is not None:  # None where its admission was interrupted
            self._slots.append(request.slot)
        self.pool.release(request.pages)
        request.slot = None
        request.kv_len = 0
        if not request.output_ids:  # its prompt will be computed again, from the start
            request.context_logits.clear()

    @staticmethod
    def _most(request: Request) -> int:
        """The most tokens whose K/V the request will ever hold."""
        return len(request.prompt_ids) + request.max_tokens
