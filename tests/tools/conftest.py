"""Tiny engines, and a prompts file for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_engines import Tiny, build_tiny

PROMPTS = [
    {"prompt": "The river"},
    {"turns": ["A small model"]},
    {"messages": [{"role": "user", "content": "First, a word"}]},
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A prompts file of three lines, a blank one before the last."""
    lines = [json.dumps(p) for p in PROMPTS]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*lines[:2], "", lines[2]]) + "\n")
    return path
