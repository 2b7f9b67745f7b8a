"""Token -> text, one token at a time, exactly as the tokenizer's own decoder does it at once.

A decoder state takes the tokens of one sequence in order. `push(token)` returns the texts that
became certain, one per token, oldest first: usually the token's own, none while a run of byte
tokens is open, several when such a run ends. `flush()` returns the texts of tokens still held; any
further entry is text that belongs to the last token (a character cut off in the middle, as U+FFFD).

Supported, by the `decoder` of tokenizer.json: ByteLevel (byte-level BPE); SentencePiece's chain of
Replace, Metaspace, ByteFallback, Fuse, Strip; none (tokens joined by spaces).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


class DecoderState(Protocol):
    def push(self, token: str) -> list[str]: ...

    def flush(self) -> list[str]: ...


class PieceError(ValueError):
    """The tokenizer's decoder is of a kind that this module does not know."""


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the rest from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    table.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


class ByteLevelState:
    """All tokens' bytes in a row, read as UTF-8; a character belongs to the token that ends it."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        try:
            raw = bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token with a character outside the alphabet stands for itself
            raw = token.encode("utf-8")
        return [self._utf8.decode(raw)]

    def flush(self) -> list[str]:
        tail = self._utf8.decode(b"", final=True)
        return [tail] if tail else []


class JoinedState:
    """No decoder: tokens joined by single spaces."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, token: str) -> list[str]:
        text = self._separator + token
        self._separator = " "
        return [text]

    def flush(self) -> list[str]:
        return []


class SentencePieceState:
    """Replace/Metaspace on each token, runs of `<0xNN>` as UTF-8, then a strip on the left."""

    def __init__(
        self, rewrites: list[Callable[[str, bool], str]], *, bytes_: bool, strip: tuple[str, int]
    ) -> None:
        self._rewrites = rewrites
        self._bytes = bytes_
        self._strip_char, self._strip_left = strip
        self._run = bytearray()  # the open run of byte tokens
        self._first = True

    def push(self, token: str) -> list[str]:
        for rewrite in self._rewrites:
            token = rewrite(token, self._first)
        self._first = False
        value = _byte_value(token) if self._bytes else None
        if value is not None:
            self._run.append(value)
            return []
        return [*self.flush(), self._stripped(token)]

    def flush(self) -> list[str]:
        run = bytes(self._run)
        self._run.clear()
        try:
            run.decode("utf-8")
        except UnicodeDecodeError:  # one bad byte spoils the whole run
            return [self._stripped(REPLACEMENT) for _ in run]
        utf8 = codecs.getincrementaldecoder("utf-8")()
        return [self._stripped(utf8.decode(bytes([byte]))) for byte in run]

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def _byte_value(token: str) -> int | None:
    """The byte that a token `<0xNN>` stands for."""
    match = _BYTE_TOKEN.fullmatch(token)
    return None if match is None else int(match[1], 16)


def _replace(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    pattern = step.get("pattern", {}).get("String")
    if not pattern:
        raise PieceError("the tokenizer's decoder step Replace has no pattern of type String")
    content = str(step.get("content", ""))
    return lambda token, _first: token.replace(pattern, content)


def _metaspace(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    mark = str(step.get("replacement", "\u2581"))
    if "prepend_scheme" in step:
        prepends = step["prepend_scheme"] != "never"
    else:
        prepends = bool(step.get("add_prefix_space", True))
    return lambda token, first: token.replace(mark, "" if first and prepends else " ")


def decoder_states(decoder: Mapping[str, Any] | None) -> Callable[[], DecoderState]:
    """From the `decoder` of tokenizer.json: a maker of fresh states, one per sequence."""
    if decoder is None:
        return JoinedState
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelState
    rewrites: list[Callable[[str, bool], str]] = []
    strip = (" ", 0)
    for i, (kind, step) in enumerate(zip(kinds, steps)):
        open_chain = not {"ByteFallback", "Fuse", "Strip"} & set(kinds[:i])
        if kind == "Replace" and open_chain:
            rewrites.append(_replace(step))
        elif kind == "Metaspace" and open_chain:
            rewrites.append(_metaspace(step))
        elif kind == "Strip" and kinds[:i][-1:] == ["Fuse"] and not step.get("stop"):
            strip = (str(step["content"]), int(step.get("start", 0)))
        elif kind != "Fuse" and not (kind == "ByteFallback" and open_chain):
            raise PieceError(
                f"the tokenizer's decoder is {' > '.join(map(str, kinds))}, of which {kind} is not "
                "supported there: supported are ByteLevel, and Replace or Metaspace > ByteFallback "
                "> Fuse > Strip (left)"
            )
    has_bytes = "ByteFallback" in kinds
    return lambda: SentencePieceState(rewrites, bytes_=has_bytes, strip=strip)
