"""A tiny Llama target as a GGUF file, readable by every runtime we compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint_edits import state_of
from factories import load_target, tiny_target
from gguf_factory import gguf_target

VOCAB = 420


def tiny_gguf(folder: Path, *, extra: dict[str, Any] | None = None) -> Path:
    """Write it into `folder`; `extra` are further metadata keys. Gives the file."""
    source = tiny_target(folder, "llama", vocab=VOCAB, tie=True)
    config = json.loads((source / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    path = folder / "tiny.gguf"
    return gguf_target(path, "llama", config, state_of(load_target(source)), extra=extra)
