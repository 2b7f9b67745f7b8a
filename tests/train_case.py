"""A tiny training case: a random target, documents of chosen lengths, settings that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_trt.build.checkpoint import open_target
from dspark_trt.build.source import TargetCheckpoint
from dspark_trt.tools.train.config import TrainConfig
from dspark_trt.tools.train.corpus import Corpus, CorpusMeta, CorpusWriter, prompt_key, read_corpus
from dspark_trt.tools.train.drafter import Drafter, initialize
from dspark_trt.tools.train.step import DraftStep
from dspark_trt.tools.train.target import TorchTarget

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "layers": 2,
    "block_size": 4,
    "rank": 8,
    "intermediate_size": 48,
    "row_tokens": 48,
    "anchors": 16,
    "rows": 4,
    "vocabulary_chunk": 64,
    "held_out": 0.0,
    "checkpoint_every": 0.0,
    "log_every": 5,
}


@dataclass(frozen=True)
class Case:
    """A target with a drafter to be trained on a corpus."""

    checkpoint: TargetCheckpoint
    target: TorchTarget
    config: TrainConfig
    drafter: Drafter
    step: DraftStep


def make_case(folder: Path, *, noise: float = 0.0, seed: int = 0, **settings: Any) -> Case:
    """The case of the target in `folder`; `noise` is added to every weight of the drafter."""
    checkpoint = open_target(folder)
    token = checkpoint.dims.vocab_size - 1
    config = TrainConfig(**(SMALL | settings)).resolved(checkpoint.dims, token)
    target = TorchTarget(checkpoint, CPU, max_tokens=config.row_tokens + 1)
    drafter = Drafter(config.drafter_dims(checkpoint.dims))
    initialize(drafter, target.embed, target.norm, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return Case(checkpoint, target, config, drafter, DraftStep(drafter, target, config))


def write_corpus(
    folder: Path,
    documents: Sequence[tuple[Sequence[int], int]],  # tokens, start of the answer
    vocab: int,
    *,
    temperature: float = 0.0,
) -> Path:
    """A data directory of these documents."""
    writer = CorpusWriter(folder, CorpusMeta(vocab, "hash", "log"), prefix="test")
    for tokens, answer in documents:
        array = np.array(tokens, np.int64)
        writer.add(array, answer, temperature, prompt_key(array[:answer]))
    writer.flush()
    return folder


def random_corpus(
    folder: Path, vocab: int, lengths: Sequence[int], *, answer: int = 3, seed: int = 0
) -> Corpus:
    """A corpus of random documents of these lengths."""
    draw = np.random.default_rng(seed)
    documents = [(draw.integers(0, vocab, length).tolist(), answer) for length in lengths]
    return read_corpus(write_corpus(folder, documents, vocab), vocab_size=vocab)
