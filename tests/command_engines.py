"""Tiny engines that the tests of the commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from factories import tiny_drafter
from markov_pair import markov_pair
from tiny_engine import tiny_engine


@dataclass(frozen=True)
class Tiny:
    """Folders: a target, a drafter that is often accepted, and engines of them."""

    target: Path
    drafter: Path
    drafted: Path
    plain: Path
    no_confidence: Path  # its drafter has no confidence head


def build_tiny(root: Path) -> Tiny:
    """Write all of them below `root`; takes about a second."""
    target, drafter = markov_pair(root, vocab=400)
    mute = tiny_drafter(root, target, confidence=None)
    return Tiny(
        target,
        drafter,
        drafted=tiny_engine(root / "drafted", target, drafter),
        plain=tiny_engine(root / "plain", target),
        no_confidence=tiny_engine(root / "no-confidence", target, mute),
    )
