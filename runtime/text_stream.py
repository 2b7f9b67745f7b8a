"""Ids -> text while they come, and where a stop string ends the output.

The joined deltas equal the decode of all ids, exactly: bytes of an unfinished character are held,
and flushed as U+FFFD at the end. Cost is O(1) per token (a table look-up and its characters).

Stop strings are matched on the text, across token borders. Of several matches the one that is
complete first wins (then the longest), so the outcome never depends on how tokens were grouped into
steps. With `s`, `e` the start and end of the match in the text:
- include_stop=False: text is cut at `s`. Ids end with the token that gives the last kept
  character: where the stop string starts at a token border, just before it; where it starts inside
  a token, that token stays, since part of its text does.
- include_stop=True: text is cut at `e`, ids end with the token that completes the match.
The text of the first `min_tokens` tokens is not searched, so at least so many tokens stay.
Text that may turn out to belong to a stop string is held back until that is decided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark_trt.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that ended the output."""

    stop: str
    num_tokens: int  # tokens that stay
    text_len: int  # characters that stay


class _StopAutomaton:
    """Knuth-Morris-Pratt on one stop string: `state` characters of it end the text so far."""

    __slots__ = ("_border", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._border = [0] * len(stop)  # longest proper border of stop[:i + 1]
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._border[length - 1]
            if stop[i] == stop[length]:
                length += 1
            self._border[i] = length

    def advance(self, char: str) -> bool:
        """Take one character; True where it completes the stop string."""
        state = self.state
        while state and self.stop[state] != char:
            state = self._border[state - 1]
        if self.stop[state] == char:
            state += 1
        self.state = state
        return state == len(self.stop)


class TextStream:
    """The text of one sequence. Special tokens add nothing to it unless asked for."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._decoder = tokenizer.decoder_state()
        self._stops = [_StopAutomaton(s) for s in stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ends: list[int] = []  # text length after each token whose text is certain
        self._waiting: list[bool] = []  # tokens without certain text: True = adds nothing (special)
        self._length = 0  # characters certain so far
        self._tail = ""  # certain, held back
        self._released: list[str] = []
        self._taken = 0  # entries of _released given out by take()
        self.match: StopMatch | None = None

    @property
    def text(self) -> str:
        """All text released so far; after `finish`, the whole text."""
        return "".join(self._released)

    @property
    def released_tokens(self) -> int:
        """Tokens that no later stop string can take back: those the released text needs."""
        if self.match is not None:
            return self.match.num_tokens
        return self._tokens_for(self._length - len(self._tail))

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; the text that became certain. After a match nothing is taken."""
        start = len(self._released)
        for id_ in ids:
            if self.match is not None:
                break
            self._num_tokens += 1
            piece = self._tokenizer.piece(id_, skip_special_tokens=self._skip_special)
            self._waiting.append(piece is None)
            if piece is None:
                self._settle([])
            else:
                self._settle(self._decoder.push(piece))
        self._release()
        return "".join(self._released[start:])

    def finish(self) -> str:
        """No more ids: the rest of the text, incomplete characters as U+FFFD."""
        start = len(self._released)
        if self.match is None:
            self._settle(self._decoder.flush())
            while self._waiting:
                self._end_token("")
        self._release(everything=True)
        return "".join(self._released[start:])

    def take(self) -> str:
        """The text released since the last call."""
        text = "".join(self._released[self._taken :])
        self._taken = len(self._released)
        return text

    def _settle(self, texts: list[str]) -> None:
        """Give certain texts to the waiting tokens, oldest first; special tokens get none."""
        for text in texts:
            while self._waiting and self._waiting[0]:
                self._end_token("")
            self._end_token(text)
            if self.match is not None:
                return
        while self._waiting and self._waiting[0]:
            self._end_token("")

    def _end_token(self, text: str) -> None:
        """One token's text is certain (or the last token got more): search it, note its end."""
        start = self._length
        self._length += len(text)
        self._tail += text
        if self._waiting:
            self._waiting.pop(0)
            self._ends.append(self._length)
        elif self._ends:
            self._ends[-1] = self._length
        if self._stops and len(self._ends) > self._min_tokens:
            self._search(text, start)

    def _search(self, text: str, start: int) -> None:
        for i, char in enumerate(text):
            done = [stop for stop in self._stops if stop.advance(char)]
            if done:
                longest = max(done, key=lambda stop: len(stop.stop)).stop
                self._end_at(longest, start + i + 1)
                return

    def _end_at(self, stop: str, end: int) -> None:
        """Cut for a match of `stop` that ends at character `end`."""
        kept = end if self._include_stop else end - len(stop)
        held_from = self._length - len(self._tail)
        self._tail = self._tail[: kept - held_from]
        self._length = kept
        num_tokens = max(self._tokens_for(kept), self._min_tokens)
        self.match = StopMatch(stop, num_tokens, kept)

    def _tokens_for(self, length: int) -> int:
        """The fewest tokens whose text has `length` characters."""
        return bisect_left(self._ends, length) + 1 if length else 0

    def _release(self, *, everything: bool = False) -> None:
        """Hand on certain text, but for what may be the start of a stop string."""
        held = 0
        if not everything and self.match is None and not self._include_stop:
            held = max((stop.state for stop in self._stops), default=0)
        text = self._tail[: len(self._tail) - held]
        if text:
            self._released.append(text)
            self._tail = self._tail[len(text) :]
