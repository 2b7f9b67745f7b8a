"""The Python API.

from dspark_trt.runtime.llm import LLM, SamplingParams

llm = LLM("engines/smollm2-135m")
for done in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
    print(done.text, done.accepted_lengths)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dspark_trt.runtime.batcher import Batcher
from dspark_trt.runtime.budget import NoDraft, Policy, Static, check_policy
from dspark_trt.runtime.engine import Engine
from dspark_trt.runtime.engine_dir import EngineDirError, Manifest, open_engine_dir
from dspark_trt.runtime.executor_onnxruntime import OnnxRuntimeExecutor
from dspark_trt.runtime.kv_cache import PagePool
from dspark_trt.runtime.request import FinishReason, Request, TokenLogprobs, new_request
from dspark_trt.runtime.sampling_params import (
    RequestError,
    SamplingParams,
    checked_int,
    refuse,
)
from dspark_trt.runtime.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Delta", "RequestError", "SamplingParams"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one sequence of one prompt came to."""

    prompt_ids: list[int]
    sequence_index: int  # of the params.n sequences of its prompt
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    # One per verification step, bonus token counted; 1 + sum == len(token_ids): see request.py.
    accepted_lengths: list[int]
    accepted_lengths_uncut: list[int]  # every step whole, also past the output's end
    logprobs: list[TokenLogprobs] | None  # one per token, where asked for
    context_logits: np.ndarray | None = None  # [prompt tokens, V] f32
    generation_logits: np.ndarray | None = None  # [tokens, V] f32
    context_limited: bool = False  # "length" because the context ended before max_tokens


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream gained in one step."""

    text: str
    token_ids: list[int]
    # Both are set on the last one.
    finish_reason: FinishReason | None
    completion: Completion | None = None


class LLM:
    """A loaded engine directory. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        policy: Policy | None = None,
        kv_pages: int | None = None,
        threads: int = 0,
        verify: Literal["hash", "size"] = "hash",
    ) -> None:
        """Open an engine; `EngineDirError` says what is wrong with it.

        policy: how much is verified; None = `Static()` where the engine has a drafter;
        `PolicyError` where it is none, or needs confidences that the engine does not give.
        kv_pages: K/V pages, None = enough for max_batch_size requests of max_seq_len tokens.
        threads: of ONNX Runtime, 0 = one per core. verify: check files by hash or by size.
        """
        advice = "give None for the engine's full batch"
        if kv_pages is not None:
            kv_pages = checked_int("kv_pages", kv_pages, low=1, advice=advice)
        threads = checked_int("threads", threads, low=0, high=1024, advice="0 = one per core")
        checked = open_engine_dir(Path(engine_dir), verify=verify)
        self.manifest = checked.manifest
        check_backend(self.manifest, engine_dir)
        self.tokenizer = Tokenizer.load(checked.path)
        limits, drafter = self.manifest.limits, self.manifest.drafter
        page_size = self.manifest.page_size
        longest = -(-limits.max_seq_len // page_size)
        pages = limits.max_batch_size * longest if kv_pages is None else kv_pages
        block = int(drafter["block_size"]) if drafter else 0  # type: ignore[call-overload]
        if policy is None:
            policy = Static() if block else NoDraft()
        head = bool(drafter and drafter.get("confidence_head"))
        check_policy(policy, drafter=block > 0, confidence_head=head)
        self.vocab_size = int(self.manifest.target["vocab_size"])  # type: ignore[call-overload]
        ends: Any = self.manifest.target["eos_token_ids"]
        self.eos_token_ids: tuple[int, ...] = tuple(ends)
        self.executor = OnnxRuntimeExecutor(
            checked.path,
            slots=limits.max_batch_size,
            max_pages=longest,
            num_pages=pages + 1,  # and the blank page
            page_size=page_size,
            vocab_size=self.vocab_size,
            block_size=block,
            threads=threads,
        )
        self.pool = PagePool(pages + 1, page_size)
        batcher = Batcher(
            self.pool,
            num_slots=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            lookahead=2 * (block + 1),
        )
        self.engine = Engine(self.executor, batcher, policy)
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        return_context_logits: bool = False,
        return_generation_logits: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Complete prompts (texts or token ids) in one ragged batch.

        params: one for all, or one per prompt. Completions come in the prompts' order, the
        `params.n` sequences of a prompt one after another. Everything is checked before the first
        step: `RequestError` names the field, the value and the bound. `progress` is called with
        (sequences done, sequences in all). No prompts, no completions.
        """
        self._check_gather(return_context_logits, return_generation_logits)
        listed = as_list(prompts)
        encoded = [self._encode(p) for p in listed]
        requests = self._requests(encoded, params, stream_text=False)
        for request in requests:
            request.keep_context_logits = return_context_logits
            request.generation_logits = [] if return_generation_logits else None
        self._run(requests, progress)
        return [self._completion(request) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_arguments: Any,
    ) -> list[Completion]:
        """Answer one conversation or several, through the model's chat template."""
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if many else [messages]
        prompts = [self.chat_prompt(m, **template_arguments) for m in conversations]
        return self.generate(prompts, params)

    def chat_prompt(self, messages: Messages, **template_arguments: Any) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        text = self.tokenizer.apply_chat_template(messages, **template_arguments)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt step by step; the deltas' texts join to the whole text.

        Leaving the iteration early cancels the request. The last delta's finish_reason is "error"
        where a step failed for another caller and took this request with it.
        """
        several = isinstance(prompt, (list, tuple)) and len(prompt) > 0
        if several and all(isinstance(p, (Sequence, np.ndarray)) for p in prompt):  # texts or lists
            advice = "call generate for several prompts"
            raise refuse("prompt", prompt, "one text or flat list of ids in a stream", advice)
        requests = self._requests([self._encode(prompt)], params, stream_text=True)
        if len(requests) != 1:
            raise refuse("n", len(requests), "1 in a stream", "call generate for several sequences")
        return self._deltas(requests[0])

    def _deltas(self, request: Request) -> Iterator[Delta]:
        stream = request.text_stream
        assert stream is not None
        sent = 0
        try:
            self.engine.add(request)
            while True:
                if not request.finished:
                    self.engine.step()
                finished = request.finished  # while this waits in `yield`, others may step it
                end = len(request.output_ids) if finished else stream.released_tokens
                text = stream.take()
                if text or end > sent or finished:
                    ids = request.output_ids[sent:end]
                    sent = max(sent, end)
                    whole = self._completion(request) if finished else None
                    yield Delta(text, ids, request.finish_reason, whole)
                if finished:
                    return
        finally:
            if not request.finished:
                self.engine.cancel(request)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
                raise refuse("prompt", prompt, "text or a list of token ids", "encode it first")
            return list(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise refuse("prompt", prompt, "text of at least one token", "give some text")
        return ids

    def _requests(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        stream_text: bool,
    ) -> list[Request]:
        if params is None:
            params = SamplingParams()
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(
                f"params are given for {len(each)} prompts, there are {len(prompts)}: give one "
                "for all, or one per prompt"
            )
        for p in each:
            if not isinstance(p, SamplingParams):
                raise refuse("params", p, "SamplingParams", "make them with SamplingParams(...)")
        limits = self.manifest.limits
        requests = [
            new_request(
                request_id=str(next(self._ids)),
                prompt_ids=ids,
                params=p,
                vocab_size=self.vocab_size,
                max_prompt_len=limits.max_input_len,
                max_seq_len=limits.max_seq_len,
                tokenizer=self.tokenizer,
                eos_token_ids=self.eos_token_ids,
                sequence_index=i,
                stream_text=stream_text,
            )
            for ids, p in zip(prompts, each, strict=True)
            for i in range(p.n)
        ]
        for request in requests:
            self.engine.batcher.check(request)
        return requests

    def _run(
        self, requests: Sequence[Request], progress: Callable[[int, int], None] | None
    ) -> None:
        try:
            for request in requests:
                self.engine.add(request)
            reported, done = -1, sum(r.finished for r in requests)
            while done < len(requests):
                self.engine.step()
                done = sum(r.finished for r in requests)  # others' steps may have ended some too
                if progress is not None and done != reported:
                    progress(done, len(requests))
                    reported = done
        finally:  # an error or an interrupt leaves no request behind
            for request in requests:
                if not request.finished:
                    self.engine.cancel(request)

    def _completion(self, request: Request) -> Completion:
        assert request.finish_reason is not None
        context = generated = None
        if request.context_logits:
            context = np.concatenate(request.context_logits)
        if request.generation_logits is not None:
            rows = [np.zeros((0, self.vocab_size), np.float32), *request.generation_logits]
            generated = np.concatenate(rows)[: len(request.output_ids)]
        return Completion(
            prompt_ids=request.prompt_ids,
            sequence_index=request.sequence_index,
            text=request.text(self.tokenizer),
            token_ids=request.output_ids,
            finish_reason=request.finish_reason,
            accepted_lengths=request.accepted_lengths,
            accepted_lengths_uncut=request.step_lengths_uncut,
            logprobs=request.logprobs,
            context_logits=context,
            generation_logits=generated,
            context_limited=request.context_limited,
        )

    def _check_gather(self, context: bool, generation: bool) -> None:
        for asked, built, what in (
            (context, self.manifest.gather_context_logits, "context"),
            (generation, self.manifest.gather_generation_logits, "generation"),
        ):
            if asked and not built:
                raise RequestError(
                    f"return_{what}_logits must be False with this engine: it was built without "
                    f"--gather-{what}-logits, build it again with it"
                )


def check_backend(manifest: Manifest, engine_dir: str | Path) -> None:
    """Refuse an engine of another backend than this runtime's."""
    if manifest.backend != "onnxruntime":
        raise EngineDirError(
            f"engine {engine_dir} was built for backend {manifest.backend!r}, this "
            "runtime has onnxruntime: build it with --backend onnxruntime"
        )


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text or a flat list of ids) or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise refuse("prompts", prompts, "a text, a list of texts or of token ids", "decode it")
    listed = list(prompts)
    if listed and all(isinstance(p, (int, np.integer)) for p in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]
