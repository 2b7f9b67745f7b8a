"""Prompts for the real model: `DSPARK_PROMPTS`, data beside the checkout, or the few written here.

`DSPARK_PROMPTS` names a `.jsonl` file or a folder of them; a line is {"turns": ["..."]} or
{"prompt": "..."}. Without it `../shared/data` is looked at; the tests need neither.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = (
    "Name three things that a lighthouse keeper does in the morning.",
    "A shop sells pens at 3 coins and books at 11 coins. What do 4 pens and 2 books cost?",
    "Write a Python function that returns the second largest number of a list.",
    "Explain to a child why the moon changes its shape.",
    "Translate into French: The train leaves at eight o'clock.",
    "Write two sentences about a fox that cannot sleep.",
    "What is the difference between a list and a tuple in Python?",
    "Solve for x: 5x - 7 = 3x + 9. Show each step.",
    "Give me a short recipe for soup with lentils and carrots.",
    "Which is larger, 7/9 or 0.78? Explain your answer.",
)


def prompts(count: int) -> list[str]:
    """Up to `count` prompts, spread evenly over every file there is."""
    named = os.environ.get("DSPARK_PROMPTS")
    source = Path(named) if named else ROOT.parent / "shared" / "data"
    if named and not source.exists():
        raise FileNotFoundError(f"DSPARK_PROMPTS names {source}, which is not there")
    files = [source] if source.is_file() else sorted(source.glob("*.jsonl"))
    if not files:
        return list(OWN[:count])
    each = -(-count // len(files))
    chosen = [_spread(_read(path), each) for path in files]
    mixed = [texts[i] for i in range(each) for texts in chosen if i < len(texts)]
    return mixed[:count]


def _read(path: Path) -> list[str]:
    # Not splitlines, which also splits at separators that may stand inside a JSON string.
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def _spread(texts: list[str], count: int) -> list[str]:
    """`count` of the texts at even distances; very long ones are left out."""
    short = [text for text in texts if len(text) < 1500]
    return [short[i * len(short) // count] for i in range(min(count, len(short)))]
