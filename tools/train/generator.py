"""Many conversations at once: a static cache, one graph for the step, sampling on the device.

A slot holds one document. Its tokens are known (a prompt) or sampled; both go through the same
step, one token each, so there is no prefill. Stages of a slot:

  USER      the user's turn is sampled, until its end token or its limit; then the `bridge` (what
            ends the turn and opens the answer) is put down as known tokens
  ANSWER    the answer is sampled, until a stop token or its limit
  IDLE      finished, or never started

Nothing on the device is read by the host but every `sync_every` steps, when finished documents are
taken out and new jobs put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dspark_trt.tools.train.config import require
from dspark_trt.tools.train.target import TorchTarget

USER, ANSWER, IDLE = 0, 1, 2
WARM_UP = 3  # steps before a graph is captured


@dataclass(frozen=True, slots=True)
class Job:
    """One document to write: `prompt`, a user's turn where there is a bridge, then an answer."""

    prompt: tuple[int, ...]
    temperature: float  # of the answer
    bridge: tuple[int, ...] = ()  # empty: the prompt is complete
    user_temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Document:
    """A finished job: the answer is `tokens[answer_start:]`, its end token included."""

    tokens: np.ndarray  # [n] int64
    answer_start: int
    temperature: float


@dataclass(frozen=True, slots=True)
class GeneratorLimits:
    """Sizes of a generator, in slots and tokens."""

    slots: int
    document_tokens: int  # longest document
    user_tokens: int = 256
    answer_tokens: int = 512
    bridge_tokens: int = 64
    sync_every: int = 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")


class Generator:
    """Runs jobs through a target; `run` yields documents as they are finished."""

    def __init__(
        self,
        target: TorchTarget,
        limits: GeneratorLimits,
        *,
        stop_ids: Sequence[int],
        turn_end: int | None = None,  # the token that ends a user's turn
        seed: int = 0,
        attention: str = "auto",  # triton | sdpa; auto: triton on CUDA
        graph: bool = True,  # record the step as a CUDA graph, on CUDA
    ) -> None:
        self.target, self.limits, self.turn_end = target, limits, turn_end
        device, slots, layer = target.device, limits.slots, target.dims.layer
        width = limits.document_tokens + limits.bridge_tokens
        shape = (slots, limits.document_tokens, layer.num_kv_heads, layer.head_dim)
        self.caches = [
            (
                torch.zeros(shape, dtype=target.dtype, device=device),
                torch.zeros(shape, dtype=target.dtype, device=device),
            )
            for _ in range(target.dims.num_layers)
        ]
        self.is_stop = torch.zeros(target.dims.vocab_size, dtype=torch.bool, device=device)
        self.is_stop[list(stop_ids)] = True

        def state(value: int = 0) -> Tensor:
            return torch.full((slots,), value, dtype=torch.int64, device=device)

        self.tokens = torch.zeros((slots, width), dtype=torch.int64, device=device)
        self.position, self.known, self.stage = state(), state(1), state(IDLE)
        self.user_limit, self.answer_start, self.limit = state(), state(), state()
        self.bridge = torch.zeros((slots, limits.bridge_tokens), dtype=torch.int64, device=device)
        self.bridge_length = state()
        self.temperature = torch.zeros(slots, device=device)
        self.answer_temperature = torch.zeros(slots, device=device)
        self.generated = 0  # tokens of finished documents, prompts included
        torch.manual_seed(seed)
        self._attention = decode_kernel(attention, device)
        self._records = graph and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, jobs: Iterator[Job]) -> Iterator[Document]:
        """Documents in the order they are finished, until `jobs` is used up and all are done."""
        self.stage.fill_(IDLE)
        ready: list[Document] = []
        while self._refill(jobs):
            if self._graph is None and self._records:
                self._capture()
            for _ in range(self.limits.sync_every):
                if self._graph is None:
                    self._step()
                else:
                    self._graph.replay()
            yield from ready  # the host's work on them, while the device runs
            ready = self._finished()
        yield from ready

    @torch.no_grad()
    def _step(self) -> None:
        """One token more in every slot. Reads and writes device state alone."""
        rows = torch.arange(self.limits.slots, device=self.tokens.device)
        current = self.tokens[rows, self.position]
        logits = self.target.decode(current, self.position, self.caches, self._attention)
        sampled = sample(logits, self.temperature)
        after = self.position + 1
        active = self.stage < IDLE
        forced = after < self.known
        token = torch.where(forced, self.tokens[rows, after], sampled)
        fresh = active & ~forced
        in_user = fresh & (self.stage == USER)
        turn_over = in_user & ((token == (self.turn_end or 0)) | (after + 1 >= self.user_limit))
        self._put_down(after, token, active, turn_over)
        start = after + self.bridge_length
        stopped = self.is_stop[token] | (after + 1 >= self.limit)
        done = fresh & (self.stage == ANSWER) & stopped
        self.known.copy_(torch.where(turn_over, start, torch.where(fresh, after + 1, self.known)))
        self.answer_start.copy_(torch.where(turn_over, start, self.answer_start))
        longest = (start + self.limits.answer_tokens).clamp(max=self.limits.document_tokens)
        self.limit.copy_(torch.where(turn_over, longest, self.limit))
        self.temperature.copy_(torch.where(turn_over, self.answer_temperature, self.temperature))
        self.position.copy_(torch.where(active & ~done, after, self.position))
        self.stage.copy_(self.stage.masked_fill(turn_over, ANSWER).masked_fill(done, IDLE))

    def _put_down(self, after: Tensor, token: Tensor, active: Tensor, turn_over: Tensor) -> None:
        """Write `token` at `after` in active slots, or the bridge from there where a turn ends."""
        step = torch.arange(self.limits.bridge_tokens, device=self.tokens.device)
        columns = after[:, None] + step
        old = self.tokens.gather(1, columns)
        bridged = turn_over[:, None] & (step < self.bridge_length[:, None])
        new = torch.where(bridged, self.bridge, old)
        first = torch.where(active, token, old[:, 0])
        new[:, 0] = torch.where(turn_over, self.bridge[:, 0], first)
        self.tokens.scatter_(1, columns, new)

    def _capture(self) -> None:
        """Record `_step` as a CUDA graph; the state is put back as it was before."""
        kept = [tensor.clone() for tensor in self._state()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        for tensor, old in zip(self._state(), kept):
            tensor.copy_(old)

    def _state(self) -> list[Tensor]:
        """What a step changes, the caches aside: they are rewritten from the same tokens."""
        return [
            self.tokens,
            self.position,
            self.known,
            self.stage,
            self.answer_start,
            self.limit,
            self.temperature,
        ]

    def _finished(self) -> list[Document]:
        """Documents of slots that went idle since the last call; marks them as free."""
        done = ((self.stage == IDLE) & (self.limit > 0)).nonzero()[:, 0]
        tokens, lengths = self.tokens[done].cpu().numpy(), self.known[done].tolist()
        starts, temperatures = self.answer_start[done].tolist(), self.temperature[done].tolist()
        self.limit[done] = 0
        self.generated += sum(lengths)
        return [
            Document(row[:length].copy(), start, round(temperature, 4))
            for row, length, start, temperature in zip(tokens, lengths, starts, temperatures)
        ]

    def _refill(self, jobs: Iterator[Job]) -> bool:
        """Put jobs into free slots; whether any slot is busy then."""
        free = (self.stage == IDLE).nonzero()[:, 0].tolist()
        taken = [job for _, job in zip(free, jobs)]
        if taken:
            self._start(torch.tensor(free[: len(taken)], device=self.tokens.device), taken)
        return bool(taken) or len(free) < self.limits.slots

    def _start(self, slots: Tensor, jobs: list[Job]) -> None:
        limits = self.limits
        for job in jobs:
            room = limits.document_tokens - len(job.prompt) - len(job.bridge)
            assert room > 1 and len(job.bridge) <= limits.bridge_tokens and job.prompt
            assert not job.bridge or self.turn_end is not None
        lengths = np.array([len(job.prompt) for job in jobs])
        asked = np.array([bool(job.bridge) for job in jobs])
        bridges = np.array([len(job.bridge) for job in jobs])
        user = np.minimum(lengths + limits.user_tokens, limits.document_tokens - bridges - 1)
        answer = np.minimum(lengths + limits.answer_tokens, limits.document_tokens)
        warm = [job.user_temperature if job.bridge else job.temperature for job in jobs]
        device = self.tokens.device
        self.tokens[slots, : lengths.max()] = _padded([job.prompt for job in jobs], device)
        if asked.any():
            self.bridge[slots, : bridges.max()] = _padded([job.bridge for job in jobs], device)
        for tensor, values in (
            (self.position, np.zeros_like(lengths)),
            (self.known, lengths),
            (self.stage, np.where(asked, USER, ANSWER)),
            (self.user_limit, user),
            (self.answer_start, lengths),
            (self.limit, answer),
            (self.bridge_length, bridges),
            (self.temperature, np.array(warm, np.float32)),
            (self.answer_temperature, np.array([j.temperature for j in jobs], np.float32)),
        ):
            tensor[slots] = torch.from_numpy(values).to(device)


def sample(logits: Tensor, temperature: Tensor) -> Tensor:
    """A token a row by the law `softmax(logits / temperature)`; temperature 0 takes the argmax.

    argmax(logits + temperature * Gumbel noise) has that law.
    """
    noise = -torch.log(torch.empty_like(logits).exponential_().clamp_(min=1e-30))
    return torch.argmax(logits + temperature[:, None] * noise, dim=-1)


def sdpa_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int = 0) -> Tensor:
    """`triton_decode.decode_attention` in plain torch; reads the whole cache."""
    slots, heads, dim = q.shape
    tokens, kv_heads = k.shape[1], k.shape[2]
    at = torch.arange(tokens, device=q.device)
    mask = at < lengths[:, None]
    if window:
        mask = mask & (at >= lengths[:, None] - window)
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, dim)  # a group shares its keys
    out = scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None, None]
    )
    return out.reshape(slots, heads * dim)


def decode_kernel(attention: str, device: torch.device) -> Callable[..., Tensor]:
    """The decode attention that is asked for: `auto` is ours in Triton on CUDA."""
    if attention == "sdpa" or (attention == "auto" and device.type != "cuda"):
        return sdpa_decode
    from dspark_trt.tools.train.triton_decode import decode_attention

    return decode_attention


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    longest = max(len(row) for row in rows)
    padded = np.zeros((len(rows), longest), np.int64)
    for row, ids in zip(padded, rows):
        row[: len(ids)] = ids
    return torch.from_numpy(padded).to(device)
