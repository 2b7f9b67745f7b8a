"""Copies of a checkpoint folder with one thing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file


def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of `folder` inside `tmp_path`, to be edited."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; the value `...` removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(
    path: Path, change: Callable[[dict[str, Any]], None], *, metadata: dict[str, str] | None = None
) -> None:
    """Rewrite a safetensors file after `change` has edited its dict of torch tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata or {"format": "pt"})


def state_of(model: Any) -> dict[str, np.ndarray]:
    """The float32 weights of a Transformers model under canonical names, a tied head left out."""
    names = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    return {name: value.float().numpy() for name, value in names.items()}
