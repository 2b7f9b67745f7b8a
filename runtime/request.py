"""One request: prompt, parameters, what was generated, and where it stands.

Counting. A request's first committed token comes from prefill and is no verification step; every
later commit is one. `accepted_lengths` has one entry per step, bonus token counted, the last one
cut where the output ends; a step that keeps nothing (its first token was an end id) has no entry.
So `1 + sum(accepted_lengths) == len(output_ids)` whenever `output_ids` is not empty, and
`accepted_lengths` is empty where it is. `step_lengths_uncut` has every step, whole.

Where the output ends, token by token in the order of generation:
1. an end id (unless `ignore_eos`) or a stop id: finish "stop". An end id is neither emitted nor
   counted; a stop id is emitted only with `include_stop`;
2. the token that completes a stop string: finish "stop", cut as text_stream.py says, which may
   reach back into earlier steps: ids, logprobs and accepted_lengths are cut at the same token;
3. `max_tokens`, or the end of the context: finish "length" (`context_limited` tells which).

Two ends come from outside: "cancelled", and "error" where a step failed that the request was part
of (engine.py). Its output is then what was committed so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Literal

import numpy as np

from dspark_trt.runtime.sampling import BadWords, philox_key
from dspark_trt.runtime.sampling_params import RequestError, SamplingParams, refuse
from dspark_trt.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from dspark_trt.runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, under the model's own law (logprobs.py)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), falling; ties: lowest id first


@dataclass(slots=True, eq=False)
class Request:
    """A sequence being generated. Made by `new_request`; the batcher owns slot, pages, kv_len."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    key: np.uint64  # of its random numbers
    max_tokens: int  # new tokens at most: params.max_tokens, less where the context ends
    eos_token_ids: frozenset[int] = frozenset()
    sequence_index: int = 0  # of the params.n sequences of one prompt
    bad_words: BadWords | None = None
    text_stream: TextStream | None = None  # None: text is decoded once, at the end
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    accepted_lengths: list[int] = field(default_factory=list)
    step_lengths_uncut: list[int] = field(default_factory=list)
    step: int = 0  # commits so far = ordinal of the next draw
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    kv_len: int = 0  # tokens whose KV is valid, the host's copy
    keep_context_logits: bool = False
    context_logits: list[np.ndarray] = field(default_factory=list)  # [rows, V] of each chunk
    generation_logits: list[np.ndarray] | None = None  # [tokens, V] of each commit; None: not kept
    # Ids that end the output when drawn: end ids (unless ignore_eos) and stop ids.
    end_ids: frozenset[int] = field(init=False)
    emitted_end_ids: frozenset[int] = field(init=False)  # those of them that are emitted

    def __post_init__(self) -> None:
        ends = frozenset() if self.params.ignore_eos else self.eos_token_ids
        stops = frozenset(self.params.stop_token_ids)
        self.end_ids = ends | stops
        self.emitted_end_ids = stops - ends if self.params.include_stop else frozenset()
        if self.params.logprobs is not None and self.logprobs is None:
            self.logprobs = []
        if self.max_tokens == 0:
            self.finish("length")

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def context_limited(self) -> bool:
        """Whether the context's end, not `params.max_tokens`, ended the output."""
        return self.finish_reason == "length" and self.max_tokens < self.params.max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output; the newest has no KV yet."""
        return len(self.prompt_ids) + len(self.output_ids)

    def last_ids(self, count: int) -> list[int]:
        """The last `count` ids (or fewer) of prompt and output."""
        output = self.output_ids
        if count <= len(output):
            return output[len(output) - count :]
        return self.prompt_ids[max(self.num_tokens - count, 0) :] + output

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> int:
        """Append a step's tokens in order, up to where the output ends.

        The first call takes the one token that prefill gave; each later call is one verification
        step: its accepted drafts and the extra token. logprobs: one per token, where asked for.
        Returns how many of `tokens` stayed; a stop string may have taken back earlier ones as well.
        """
        assert not self.finished, f"commit to finished request {self.request_id}"
        is_step = self.step > 0
        assert len(tokens) > 0 and (is_step or len(tokens) == 1)
        self.step += 1
        before = len(self.output_ids)
        reason: FinishReason | None = None
        for i, token in enumerate(tokens):
            reason = self._append(int(token), None if logprobs is None else logprobs[i])
            if reason is not None:
                break
        if is_step:
            self.step_lengths_uncut.append(len(tokens))
            if len(self.output_ids) > before:
                self.accepted_lengths.append(len(self.output_ids) - before)
        if reason is not None:
            self.finish(reason)
        return max(len(self.output_ids) - before, 0)

    def finish(self, reason: FinishReason) -> None:
        """End the request: the text is flushed and everything cut at the same token."""
        if self.finished:
            return
        self.status = Status.FINISHED
        self.finish_reason = reason
        if self.text_stream is None:
            return
        self.text_stream.finish()
        if self.text_stream.match is not None:
            self._truncate(self.text_stream.match.num_tokens)
            if reason == "length":
                self.finish_reason = "stop"

    def text(self, tokenizer: Tokenizer) -> str:
        """The whole text of a finished request."""
        if self.text_stream is not None:
            return self.text_stream.text
        return tokenizer.decode(self.output_ids)

    def _append(self, token: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Append one token unless it ends the output unseen; the reason if the output ends."""
        ends = token in self.end_ids
        if ends and token not in self.emitted_end_ids:
            return "stop"
        self.output_ids.append(token)
        if self.logprobs is not None:
            assert logprobs is not None, f"request {self.request_id} asked for logprobs"
            self.logprobs.append(logprobs)
        if self.text_stream is not None:
            self.text_stream.push((token,))
            if self.text_stream.match is not None:
                return "stop"
        if ends:
            return "stop"
        return "length" if len(self.output_ids) >= self.max_tokens else None

    def _truncate(self, num_tokens: int) -> None:
        """Cut ids, logprobs and accepted_lengths after the first `num_tokens` tokens."""
        del self.output_ids[num_tokens:]
        if self.logprobs is not None:
            del self.logprobs[num_tokens:]
        surplus = sum(self.accepted_lengths) - max(num_tokens - 1, 0)
        while surplus > 0:
            last = self.accepted_lengths.pop()
            if last > surplus:
                self.accepted_lengths.append(last - surplus)
            surplus -= last


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_prompt_len: int) -> None:
    """Refuse an empty prompt, one that leaves no room, and ids that the model does not have."""
    if len(prompt_ids) == 0:
        raise refuse("prompt", [], "at least one token", "give some text")
    if len(prompt_ids) > max_prompt_len:
        raise RequestError(
            f"Prompt length ({len(prompt_ids)}) exceeds maximum input length ({max_prompt_len}): "
            "shorten the prompt or build the engine with a larger --max-input-len"
        )
    if not all(isinstance(id_, Integral) and not isinstance(id_, bool) for id_ in prompt_ids):
        raise refuse("prompt", prompt_ids, "a flat list of integer ids", "encode it first")
    ids = np.asarray(prompt_ids)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        i = int(outside[0])
        raise refuse(
            f"prompt_ids[{i}]",
            int(ids[i]),
            f"in [0, {vocab_size})",
            "the prompt was encoded with another model's tokenizer",
        )


def bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """`params.bad_words` as ids; a string stands for itself without and with one leading space."""
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        if not isinstance(word, str):
            words.append(tuple(word))
            continue
        if tokenizer is None:
            raise refuse("bad_words", word, "token ids", "this engine has no tokenizer")
        core = word.lstrip(" ")
        for text in (core, " " + core) if core else (word,):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids:
                words.append(tuple(ids))
    return words


def check_bans(request: Request, vocab_size: int) -> None:
    """Refuse bans that leave no token to draw at the first position.

    Longer bad words can come to that later on, after what precedes their last ids: where every
    token is banned none of the bans counts for more than another, and the lowest id is drawn.
    """
    banned = set(request.bad_words.single) if request.bad_words is not None else set()
    if request.params.min_tokens > 0:
        banned |= request.end_ids
    if request.max_tokens > 0 and len(banned) >= vocab_size:
        raise RequestError(
            f"bad_words (and the end ids, before min_tokens) must leave a token to draw, they ban "
            f"all {vocab_size}: leave some out"
        )


def new_request(
    *,
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    vocab_size: int,
    max_prompt_len: int,
    max_seq_len: int,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: Sequence[int] | None = None,
    sequence_index: int = 0,
    stream_text: bool = False,
) -> Request:
    """A checked request, WAITING (or FINISHED where it may generate nothing).

    max_prompt_len: longest prompt; max_seq_len: prompt and output together, to which the number of
    new tokens is clamped. eos_token_ids: None takes the tokenizer's. stream_text: keep the text
    up to date after every commit; needed anyway where there are stop strings.
    """
    limit = min(max_prompt_len, max_seq_len - 1)  # room for one token at least
    check_prompt(prompt_ids, vocab_size=vocab_size, max_prompt_len=limit)
    params.check_vocabulary(vocab_size)
    if eos_token_ids is None:
        eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
    stream = None
    if params.stop or stream_text:
        if tokenizer is None:
            raise refuse("stop", params.stop, "empty", "text needs a tokenizer: use stop_token_ids")
        stream = TextStream(
            tokenizer,
            stop=tuple(params.stop),
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )
    ids = [int(id_) for id_ in prompt_ids]
    request = Request(
        request_id=request_id,
        prompt_ids=ids,
        params=params,
        key=philox_key(params.seed, ids, sequence_index),
        max_tokens=min(params.max_tokens, max_seq_len - len(ids)),
        eos_token_ids=frozenset(eos_token_ids),
        sequence_index=sequence_index,
        bad_words=BadWords.from_ids(bad_word_ids(params, tokenizer)),
        text_stream=stream,
    )
    check_bans(request, vocab_size)
    return request
