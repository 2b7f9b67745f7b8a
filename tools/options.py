"""Command-line options: what argparse refuses by itself says the bound and the value."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable


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


def parser(command: str, *, description: str, examples: str) -> argparse.ArgumentParser:
    """An empty parser of a subcommand: no abbreviations, examples at the end."""
    return argparse.ArgumentParser(
        prog=f"dspark {command}",
        description=textwrap.fill(description, 80),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
