"""Data of a run: written by the target, or read from a server's log, into a data directory."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark_trt.build.source import TargetCheckpoint
from dspark_trt.runtime.sampling_params import RequestError
from dspark_trt.runtime.tokenizer import Tokenizer
from dspark_trt.tools.prompts import Prompt, read_prompts
from dspark_trt.tools.train.config import MAX_TEMPERATURE, TrainError, require
from dspark_trt.tools.train.conversation import (
    Turn,
    prompt_jobs,
    read_styles,
    special_ids,
    synthetic_jobs,
    tokenizer_of,
    user_turn,
)
from dspark_trt.tools.train.corpus import CorpusMeta, CorpusWriter, prompt_key
from dspark_trt.tools.train.generator import Document, Generator, GeneratorLimits, Job
from dspark_trt.tools.train.known_sets import known_set
from dspark_trt.tools.train.target import TorchTarget

SHARD_TOKENS = 1 << 22
REPORT_EVERY = 10.0  # seconds
MAX_SLOTS = 2048
CPU_SLOTS = 32
CACHE_SHARE = 0.6  # of the free memory


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What to write, and how."""

    synthesize: int = 0  # tokens; 0: only the prompts
    prompts: Path | None = None
    styles: Path | None = None
    max_seconds: float = 0.0  # of generation; 0: no bound
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    user_temperatures: tuple[float, ...] = (0.7, 0.9, 1.0)
    document_tokens: int = 1024
    user_tokens: int = 256
    answer_tokens: int = 512
    slots: int = 0  # 0: by the memory
    seed: int = 0
    attention: str = "auto"  # of decoding: triton | sdpa
    graph: bool = True  # CUDA graph of the step

    def __post_init__(self) -> None:
        for name in ("temperatures", "user_temperatures"):
            values = getattr(self, name)
            require(bool(values), f"{name} is empty: give at least one")
            require(
                all(0 <= value <= MAX_TEMPERATURE for value in values),
                f"{name} must be in [0, {MAX_TEMPERATURE:g}], got {list(values)}",
            )
        require(
            bool(self.synthesize) or self.prompts is not None,
            "nothing to write: give --synthesize N_TOKENS or --prompts FILE",
        )


class Filter:
    """Which documents are kept: each prompt once a temperature, none of an evaluation set."""

    def __init__(self, tokenizer: Tokenizer, turn: Turn | None) -> None:
        self._tokenizer, self._turn = tokenizer, turn
        self._seen: set[tuple[int, float]] = set()
        self.repeated = self.known = 0

    def key(self, document: Document, *, synthetic: bool) -> int | None:
        """The key of the document's prompt, None where the document is left out."""
        prompt = document.tokens[: document.answer_start]
        key = prompt_key(prompt)
        if (key, document.temperature) in self._seen:
            self.repeated += 1
            return None
        if synthetic and self._turn is not None:
            text = prompt[len(self._turn.header) : len(prompt) - len(self._turn.opening)]
            if known_set(self._tokenizer.decode(text.tolist())) is not None:
                self.known += 1
                return None
        self._seen.add((key, document.temperature))
        return key


def write_data(
    checkpoint: TargetCheckpoint,
    target: TorchTarget,
    options: DataOptions,
    folder: Path,
    *,
    part: tuple[int, int] = (0, 1),  # this process, of how many
) -> None:
    """Let the target write documents into `folder`, until the tokens or the seconds are reached."""
    tokenizer = tokenizer_of(checkpoint.tokenizer)
    turn = None
    if options.synthesize:
        turn = user_turn(tokenizer, set(special_ids(checkpoint.tokenizer).values()))
    jobs, limits = _jobs(tokenizer, turn, options, target, part)
    source = "synthesized" if options.synthesize else "prompts"
    meta = CorpusMeta(target.dims.vocab_size, checkpoint.content_hash, source)
    writer = CorpusWriter(folder, meta, prefix=f"p{part[0]}")
    generator = Generator(
        target,
        limits,
        stop_ids=sorted({*target.dims.eos_token_ids}),
        turn_end=turn.end if turn else None,
        seed=options.seed + part[0],
        attention=options.attention,
        graph=options.graph,
    )
    wanted = options.synthesize // part[1] if options.synthesize else None
    _write(generator, jobs, writer, Filter(tokenizer, turn), wanted, options.max_seconds)


def _jobs(
    tokenizer: Tokenizer,
    turn: Turn | None,
    options: DataOptions,
    target: TorchTarget,
    part: tuple[int, int],
) -> tuple[Iterator[Job], GeneratorLimits]:
    """The jobs of this process, prompts first, and the sizes that hold them."""

    def every() -> Iterator[Job]:
        if options.prompts is not None:
            prompts = encoded_prompts(tokenizer, options.prompts)[part[0] :: part[1]]
            room = options.document_tokens - 2
            yield from prompt_jobs([p for p in prompts if len(p) <= room], options.temperatures)
        if turn is not None:
            yield from synthetic_jobs(
                tokenizer,
                turn,
                read_styles(options.styles),
                user_temperatures=options.user_temperatures,
                temperatures=options.temperatures,
                seed=options.seed * part[1] + part[0],
            )

    limits = GeneratorLimits(
        slots=options.slots or _slots(target, options.document_tokens),
        document_tokens=options.document_tokens,
        user_tokens=options.user_tokens,
        answer_tokens=options.answer_tokens,
    )
    return every(), limits


def _slots(target: TorchTarget, tokens: int) -> int:
    """As many documents at once as the memory takes."""
    if target.device.type != "cuda":
        return CPU_SLOTS
    layer = target.dims.layer
    each = 4 * target.dims.num_layers * tokens * layer.num_kv_heads * layer.head_dim
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(MAX_SLOTS, int(CACHE_SHARE * free / each)))


def _write(
    generator: Generator,
    jobs: Iterator[Job],
    writer: CorpusWriter,
    kept: Filter,
    wanted: int | None,  # tokens
    max_seconds: float,
) -> None:
    started = shown = time.monotonic()
    documents = tokens = answers = 0
    for document in generator.run(jobs):
        key = kept.key(document, synthetic=wanted is not None)
        if key is not None and len(document.tokens) - document.answer_start >= 2:
            writer.add(document.tokens, document.answer_start, document.temperature, key)
            documents += 1
            tokens += len(document.tokens)
            answers += len(document.tokens) - document.answer_start
        if writer.pending >= SHARD_TOKENS:
            writer.flush()
        now = time.monotonic()
        over = max_seconds and now - started >= max_seconds
        done = wanted is not None and tokens >= wanted
        if now - shown >= REPORT_EVERY or over or done:
            shown, rate = now, generator.generated / (now - started)
            goal = f"/{wanted / 1e6:.1f}M" if wanted else ""
            say(f"data: {tokens / 1e6:.2f}M{goal} tokens, {rate:,.0f} tokens/s")
        if over or done:
            break
    writer.flush()
    seconds = time.monotonic() - started
    say(
        f"data: {documents} documents, {tokens} tokens ({answers} of answers) in {seconds:.0f} s; "
        f"left out: {kept.repeated} repeated, {kept.known} of evaluation sets"
    )
    require(documents > 0, "the target wrote no document in this time: give it more")


def say(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def encoded_prompts(tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    """Token ids of a prompts file, through the chat template where the target has one."""
    prompts = read_prompts(path)
    for prompt in prompts:
        refuse_known(path, prompt)
    return [_encode(tokenizer, path, prompt) for prompt in prompts]


def refuse_known(path: Path, prompt: Prompt) -> None:
    """Refuse a prompt of an evaluation set."""
    for message in prompt.as_messages():
        text = message.get("content")
        name = known_set(text) if isinstance(text, str) else None
        require(
            name is None,
            f"{path}:{prompt.line}: this prompt is of the evaluation set {name}: a drafter trained "
            "on it has no honest figure; take such lines out",
        )


def _encode(tokenizer: Tokenizer, path: Path, prompt: Prompt) -> list[int]:
    try:
        if tokenizer.config.chat_template is None and prompt.text is not None:
            return tokenizer.encode(prompt.text)
        text = tokenizer.apply_chat_template(prompt.as_messages())
        return tokenizer.encode(text, add_special_tokens=False)
    except RequestError as error:
        raise TrainError(f"{path}:{prompt.line}: {error}") from None


def import_log(checkpoint: TargetCheckpoint, log: Path, folder: Path) -> None:
    """A server's log into `folder`: prompts files whose lines also hold `response`, a text."""
    tokenizer = tokenizer_of(checkpoint.tokenizer)
    responses = _responses(log)
    meta = CorpusMeta(checkpoint.dims.vocab_size, checkpoint.content_hash, "log")
    writer = CorpusWriter(folder, meta, prefix="log")
    end: Sequence[int] = checkpoint.dims.eos_token_ids[:1]
    import numpy as np

    for prompt in read_prompts(log):
        refuse_known(log, prompt)
        ids = _encode(tokenizer, log, prompt)
        answer = tokenizer.encode(responses[prompt.line], add_special_tokens=False)
        tokens = np.array([*ids, *answer, *end], np.int64)
        writer.add(tokens, len(ids), -1.0, prompt_key(tokens))
    writer.flush()


def _responses(log: Path) -> dict[int, str]:
    """Line number -> its `response`."""
    found = {}
    for number, line in enumerate(log.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrainError(f"{log}:{number}: not JSON: {error.msg}") from None
        response = value.get("response") if isinstance(value, dict) else None
        require(
            isinstance(response, str) and bool(response),
            f"{log}:{number}: needs `response`, the text that the target answered with",
        )
        found[number] = str(response)
    return found
