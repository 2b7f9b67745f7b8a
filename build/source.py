"""What a checkpoint is once its format is behind us: the types that every reader returns.

A reader gives names and shapes at once and tensors one at a time, as float32 and under canonical
names: Hugging Face's, without the leading `model.`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from dspark_trt.build.config import ConfigError, DrafterDims, TargetDims

HASH_CHUNK = 1 << 22  # bytes
MAX_MESSAGE = 2000  # characters


class CheckpointError(ValueError):
    """A file of a checkpoint is missing, damaged, unsafe, or not what its config calls for.

    Messages quote names out of strangers' files, so what does not print is escaped, and the rest
    of an endless message is cut.
    """

    def __init__(self, message: str) -> None:
        text = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


class WeightSource(Protocol):
    """Tensors of a checkpoint by canonical name; nothing is read before `tensor` is called."""

    path: Path

    def names(self) -> list[str]:
        """Every tensor in the files, in order of name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of `names()`; linear weights are [out, in]."""

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor; raises `CheckpointError` where a value is NaN or infinite."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer as the runtime takes it.

    `config` has exactly the keys bos_token, eos_token, pad_token, unk_token (str or None),
    eos_token_ids (list of int), add_bos (a plain prompt starts with bos_token), chat_template
    (Jinja text or None) and vocab_size (every id of the tokenizer is below it).
    """

    tokenizer_json: str
    config: dict[str, object]


@dataclass(frozen=True)
class TargetCheckpoint:
    """An opened target: everything about its shape is known, no weight has been read."""

    source_format: str  # huggingface | gguf | tensorrt-llm
    dims: TargetDims
    weights: WeightSource
    weight_dtype: str  # what most bytes of the file are: bfloat16, Q4_1, ...
    tokenizer: TokenizerFiles
    generation_config: dict[str, object]
    files: tuple[Path, ...]  # what `content_hash` covers

    @cached_property
    def content_hash(self) -> str:
        """sha256 (hex) over names, sizes and contents of `files`; streamed on first use."""
        return hash_files(self.files)


@dataclass(frozen=True)
class DrafterCheckpoint:
    """An opened drafter, consistent with the target it was opened for."""

    dims: DrafterDims
    weights: WeightSource
    weight_dtype: str
    files: tuple[Path, ...]

    @cached_property
    def content_hash(self) -> str:
        """sha256 (hex) over names, sizes and contents of `files`; streamed on first use."""
        return hash_files(self.files)


def hash_files(files: Iterable[Path]) -> str:
    """sha256 (hex) over the name, size and content of each file, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.name):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def check_finite(path: Path, name: str, values: np.ndarray) -> None:
    """Refuse a tensor with a NaN or an infinity, by name and first position."""
    # A float64 sum of float32 values cannot overflow, so it is finite only if all of them are.
    with np.errstate(invalid="ignore"):
        total = np.sum(values, dtype=np.float64)
    if np.isfinite(total):
        return
    bad = np.argwhere(~np.isfinite(values))
    where = [int(i) for i in bad[0]]
    raise CheckpointError(
        f"{path}: tensor {name} has {len(bad)} values that are NaN or infinite, the first at "
        f"{where} ({values[tuple(bad[0])]}): the checkpoint is damaged, get it again"
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the file's name before the message of a `ConfigError` that lacks it."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith(str(path)):
            raise
        raise ConfigError(f"{path}: {error}") from error


def existing_file(path: Path, *, needed_for: str) -> Path:
    """`path` if it is a readable file, else a `CheckpointError` that says what it is needed for."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: it is needed for {needed_for}")
    return path
