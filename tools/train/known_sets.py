"""Prompts of public benchmarks that stay out of training, by fingerprint.

A drafter trained on what it is measured on has no honest figure. The fingerprint of a prompt is a
hash of its first letters and digits, so that an instruction added at its end does not hide it.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("known_sets.json")
LENGTH = 120  # letters and digits that count
HEX = 12  # digits of a fingerprint
INSTRUCTION = "pleasereasonstepbystep"  # what the sets' own prompts end with


def fingerprint(text: str) -> str:
    """A hash of the first `LENGTH` letters and digits of `text` before the usual instruction."""
    letters = "".join(char for char in text.lower() if char.isalnum())
    kept = letters.split(INSTRUCTION)[0][:LENGTH]
    return hashlib.sha256(kept.encode("utf-8", "replace")).hexdigest()[:HEX]


@lru_cache(maxsize=1)
def _owners() -> dict[str, str]:
    """Fingerprint -> name of its set."""
    sets: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        packed[i : i + HEX]: name
        for name, packed in sets.items()
        for i in range(0, len(packed), HEX)
    }


def known_set(text: str) -> str | None:
    """The evaluation set that a prompt is from, or None."""
    return _owners().get(fingerprint(text))
