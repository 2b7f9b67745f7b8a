"""Prompts files: JSON lines, each checked before any work starts.

A line is an object with exactly one of `prompt` (text), `turns` (texts, the first of which is used)
and `messages` (objects with `role` and `content`, whose further keys go to the chat template).
Beside it only the labels in `LABELS`, which nothing reads, may stand. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

KINDS = ("prompt", "turns", "messages")
# What published question sets have beside the question.
LABELS = ("id", "question_id", "category", "reference")


class PromptsError(ValueError):
    """A prompts file holds a line that is no prompt; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: plain text, or messages for the chat template."""

    line: int  # in its file, from 1
    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()

    def as_messages(self) -> list[dict[str, Any]]:
        """The messages; plain text is one message of the user."""
        if self.text is None:
            return [dict(message) for message in self.messages]
        return [{"role": "user", "content": self.text}]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; `PromptsError` at the first line that is none, or if there is none."""
    prompts = [_prompt(path, number, line) for number, line in _lines(path)]
    if not prompts:
        raise PromptsError(f"{path} holds no prompts: write one JSON object a line")
    return prompts


def _fail(path: Path, number: int, what: str) -> NoReturn:
    raise PromptsError(f"{path}:{number}: {what}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that hold something, with their numbers."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptsError(f"cannot read prompts {path}: {error.strerror}") from None
    for number, raw in enumerate(data.split(b"\n"), 1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            _fail(path, number, f"not UTF-8 at byte {error.start + 1} of the line")
        if line:
            yield number, line


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        _fail(path, number, f"not JSON: {error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:
        _fail(path, number, f"not JSON: {error}")
    if not isinstance(value, dict):
        _fail(path, number, f"must be an object, got {type(value).__name__}")
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        found = ", ".join(kinds) or "none of them"
        _fail(path, number, f"needs exactly one of {', '.join(KINDS)}, has {found}")
    _check_unicode(path, number, value)
    if unknown := sorted(set(value) - {*KINDS, *LABELS}):
        allowed = f"one of {', '.join(KINDS)}, and {', '.join(LABELS)}"
        _fail(
            path, number, f"has unknown keys {', '.join(map(repr, unknown))}: allowed are {allowed}"
        )
    content = value[kinds[0]]
    if kinds[0] == "messages":
        return Prompt(number, messages=_messages(path, number, content))
    if kinds[0] == "turns":
        if not isinstance(content, list) or not content:
            _fail(path, number, "turns must be a list of texts that is not empty")
        content = content[0]
    return Prompt(number, text=_text(path, number, kinds[0], content))


def _messages(path: Path, number: int, content: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(content, list) or not content:
        _fail(path, number, "messages must be a list of objects that is not empty")
    for i, message in enumerate(content):
        if not isinstance(message, dict):
            _fail(path, number, f"messages[{i}] must be an object with role and content")
        for key in ("role", "content"):
            _text(path, number, f"messages[{i}].{key}", message.get(key), empty=key == "content")
    return tuple(content)


def _text(path: Path, number: int, name: str, value: Any, *, empty: bool = False) -> str:
    """`value` if it is a text and (unless `empty`) not empty."""
    if not isinstance(value, str):
        _fail(path, number, f"{name} must be a text, got {type(value).__name__}")
    if not value and not empty:
        _fail(path, number, f"{name} is empty")
    return value


def _check_unicode(path: Path, number: int, value: Any, name: str = "") -> None:
    """Refuse half a surrogate pair in any key or text of the line, however deep."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(path, number, key, f"key {key!r}")
            _check_unicode(path, number, item, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_unicode(path, number, item, f"{name}[{i}]")
    elif isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            _fail(path, number, f"{name} has half a surrogate pair at character {error.start + 1}")
