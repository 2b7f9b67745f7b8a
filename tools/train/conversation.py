"""The target's chat template as token ids: prompts, and what stands around a user's turn."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dspark_trt.build.source import TokenizerFiles
from dspark_trt.runtime.tokenizer import Tokenizer, TokenizerConfig
from dspark_trt.runtime.typed_json import JsonError, from_json
from dspark_trt.tools.train.config import TrainError, require
from dspark_trt.tools.train.generator import Job

MARK = "dspark-user-turn"  # stands for a user's turn while the template is taken apart
STYLES = Path(__file__).with_name("styles.json")


@dataclass(frozen=True, slots=True)
class Style:
    """How a synthesized user turn begins and ends; the target writes the middle."""

    weight: float
    start: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Token ids around a user's turn: header before it; end token; opening of the answer."""

    header: tuple[int, ...]
    end: int
    opening: tuple[int, ...]  # starts with `end`


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    """The runtime's tokenizer, from a checkpoint's files."""
    config = TokenizerConfig.from_json(files.config, Path("the target's tokenizer"))
    return Tokenizer(files.tokenizer_json, config, where="the target's tokenizer")


def special_ids(files: TokenizerFiles) -> dict[str, int]:
    """Special tokens of the tokenizer: text -> id."""
    added = json.loads(files.tokenizer_json).get("added_tokens", [])
    return {str(token["content"]): int(token["id"]) for token in added if token["special"]}


def unused_token(files: TokenizerFiles, vocab_size: int) -> int:
    """A token for the masks: the last special one that chats do not use, else the last of all."""
    config = files.config
    used = {config[name] for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    template = str(config["chat_template"] or "")
    eos = cast("list[int]", config["eos_token_ids"])
    free = [
        id_
        for text, id_ in special_ids(files).items()
        if text not in used and text not in template and id_ not in eos and id_ < vocab_size
    ]
    return max(free, default=vocab_size - 1)


def user_turn(tokenizer: Tokenizer, specials: set[int]) -> Turn:
    """Take the chat template apart at a user's turn."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}])
    parts = text.split(MARK)
    require(
        len(parts) == 2 and bool(parts[0]),
        "the target's chat template repeats or changes the user's text, so user turns cannot be "
        "synthesized: give prompts with --prompts",
    )
    header, opening = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in parts)
    require(
        bool(opening) and opening[0] in specials,
        "the target's chat template ends a user's turn with no special token, so the target cannot "
        "say where its own turns end: give prompts with --prompts",
    )
    return Turn(header, opening[0], opening)


def read_styles(path: Path | None) -> list[Style]:
    """Styles from a JSON file: a list of objects with weight, start and end."""
    path = path or STYLES
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        require(isinstance(values, list) and bool(values), f"{path} must hold a list of styles")
        styles = [from_json(Style, value, f"{path}[{i}]") for i, value in enumerate(values)]
    except (json.JSONDecodeError, JsonError, UnicodeDecodeError) as error:
        raise TrainError(f"{path} is no styles file: {error}") from None
    require(min(style.weight for style in styles) > 0, f"{path}: weights must be > 0")
    return styles


def synthetic_jobs(
    tokenizer: Tokenizer,
    turn: Turn,
    styles: Sequence[Style],
    *,
    user_temperatures: Sequence[float],
    temperatures: Sequence[float],
    seed: int,
) -> Iterator[Job]:
    """Endless jobs, each of a random style and random temperatures of user's turn and answer."""
    draw = random.Random(seed)
    ready = [_styled(tokenizer, turn, style) for style in styles]
    weights = [style.weight for style in styles]
    while True:
        (job,) = draw.choices(ready, weights)
        yield dataclasses.replace(
            job,
            temperature=draw.choice(temperatures),
            user_temperature=draw.choice(user_temperatures),
        )


def _styled(tokenizer: Tokenizer, turn: Turn, style: Style) -> Job:
    start = tokenizer.encode(style.start, add_special_tokens=False)
    end = tokenizer.encode(style.end, add_special_tokens=False)
    return Job((*turn.header, *start), 0.0, bridge=(*end, *turn.opening))


def prompt_jobs(prompts: Sequence[Sequence[int]], temperatures: Sequence[float]) -> Iterator[Job]:
    """Every prompt once at each temperature."""
    for temperature in dict.fromkeys(temperatures):
        for prompt in prompts:
            yield Job(tuple(prompt), temperature)
