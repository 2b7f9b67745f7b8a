"""Command-line options: what argparse refuses by itself says the bound and the value."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn

MAX_THREADS = 1024


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line that names where help is, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        print(f"dspark: error: {line}: see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An integer in `[low, high]`."""
    bound = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text!r}") from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be {bound}, got {value}")
        return value

    return parse


def integers(low: int) -> Callable[[str], list[int]]:
    """Integers >= `low` with commas between them."""
    one = integer(low)

    def parse(text: str) -> list[int]:
        return [one(part) for part in text.split(",")]

    return parse


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """A finite number in `[low, high]`."""
    bound = f"a number >= {low:g}" if math.isinf(high) else f"a number in [{low:g}, {high:g}]"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text!r}") from None
        if not (low <= value <= high and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text}")
        return value

    return parse


def numbers(low: float, high: float = math.inf) -> Callable[[str], list[float]]:
    """Finite numbers in `[low, high]` with commas between them."""
    one = number(low, high)

    def parse(text: str) -> list[float]:
        return [one(part) for part in text.split(",")]

    return parse


def parser(command: str, *, description: str, examples: str) -> argparse.ArgumentParser:
    """An empty parser of a subcommand: no abbreviations, examples at the end."""
    return Parser(
        prog=f"dspark {command}",
        description=textwrap.fill(description, 80),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
