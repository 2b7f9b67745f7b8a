"""Token shards on disk: documents, each a prompt and the target's answer to it.

A data directory holds `data.json` and, for every shard, `NAME.tokens.npy` (flat, uint16 or uint32)
and `NAME.documents.npy`, one record a document: `end` (exclusive, in the flat array), `answer`
(where the answer starts, from the document's start), `temperature` (of the answer; -1: not known)
and `key` (a hash of the prompt). The loss mask of a document is its answer. A shard counts once its
`documents` file is there, which is renamed into place last.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dspark_trt.runtime.typed_json import JsonError, from_json, read_json
from dspark_trt.tools.train.config import TrainError, require

RECORD = np.dtype([("end", "<i8"), ("answer", "<i4"), ("temperature", "<f4"), ("key", "<u8")])
META = "data.json"
KEY_RANGE = 1 << 32


@dataclass(frozen=True, slots=True)
class CorpusMeta:
    """What a data directory says about itself."""

    vocab_size: int
    target: str  # content hash of the target that wrote the answers
    source: str  # synthesized | prompts | log


def prompt_key(tokens: np.ndarray) -> int:
    """A hash of a prompt; equal prompts fall on the same side of the held-out split."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class CorpusWriter:
    """Appends shards to a data directory."""

    def __init__(self, folder: Path, meta: CorpusMeta, *, prefix: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / META
        if path.exists():
            found = read_meta(folder)
            require(
                found == meta,
                f"{folder} holds data of another kind ({found}, not {meta}): name another folder",
            )
        else:
            path.write_text(json.dumps(asdict(meta), indent=2) + "\n", encoding="utf-8")
        self._folder, self._prefix = folder, prefix
        self._dtype = np.uint16 if meta.vocab_size <= 1 << 16 else np.uint32
        self._tokens: list[np.ndarray] = []
        self._records: list[tuple[int, int, float, int]] = []
        self._end = 0

    def add(self, tokens: np.ndarray, answer: int, temperature: float, key: int) -> None:
        """Put one document into the open shard."""
        self._end += len(tokens)
        self._tokens.append(tokens.astype(self._dtype))
        self._records.append((self._end, answer, temperature, key))

    @property
    def pending(self) -> int:
        """Tokens of the open shard."""
        return self._end

    def flush(self) -> None:
        """Write the open shard and start a new one."""
        if not self._records:
            return
        number = len(list(self._folder.glob(f"{self._prefix}-*.documents.npy")))
        name = f"{self._prefix}-{number:05}"
        np.save(self._folder / f"{name}.tokens.npy", np.concatenate(self._tokens))
        beside = self._folder / f".{name}.documents.npy"
        np.save(beside, np.array(self._records, RECORD))
        beside.replace(self._folder / f"{name}.documents.npy")
        self._tokens, self._records, self._end = [], [], 0


class Corpus:
    """The documents of a data directory: flat tokens in memory, one record a document."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, records: np.ndarray) -> None:
        self.tokens = tokens  # flat
        self.starts = starts  # [n] int64, of each document
        self.records = records  # [n] RECORD

    def __len__(self) -> int:
        return len(self.records)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: [n] int64."""
        return self.records["end"] - self.starts

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, int64."""
        start, end = int(self.starts[index]), int(self.records["end"][index])
        return self.tokens[start:end].astype(np.int64)

    def subset(self, chosen: np.ndarray) -> Corpus:
        """The documents where `chosen` [n] is true; tokens are shared."""
        return Corpus(self.tokens, self.starts[chosen], self.records[chosen])

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """(training, held out), by the prompts' hashes."""
        out = self.records["key"] % KEY_RANGE < int(held_out * KEY_RANGE)
        return self.subset(~out), self.subset(out)


def read_meta(folder: Path) -> CorpusMeta:
    """The `data.json` of a data directory."""
    try:
        values = read_json(folder / META, max_bytes=1 << 20)
        return from_json(CorpusMeta, values, str(folder / META))
    except (OSError, JsonError) as error:
        raise TrainError(f"{folder} is no data directory of dspark train: {error}") from None


def read_corpus(folder: Path, *, vocab_size: int) -> Corpus:
    """All complete shards of `folder`, documents of one prompt and temperature taken once."""
    meta = read_meta(folder)
    require(
        meta.vocab_size == vocab_size,
        f"{folder} was written for a vocabulary of {meta.vocab_size}, the target has "
        f"{vocab_size}: this data belongs to another target",
    )
    flat, starts, records, offset = [], [], [], 0
    for path in sorted(folder.glob("[!.]*.documents.npy")):
        found = np.load(path)
        tokens = np.load(path.with_name(path.name.replace(".documents.", ".tokens.")))
        require(
            found.dtype == RECORD and len(found) > 0 and found["end"][-1] == len(tokens),
            f"{path} and its tokens do not belong together: write the data again",
        )
        ends = found["end"] + offset
        starts.append(np.concatenate([[offset], ends[:-1]]))
        found["end"] = ends
        flat.append(tokens)
        records.append(found)
        offset += len(tokens)
    require(bool(records), f"{folder} is empty: it holds no documents, generate some first")
    tokens = np.concatenate(flat)
    highest = int(tokens.max(initial=0))
    require(highest < vocab_size, f"{folder}: token {highest} is outside the vocabulary")
    corpus = Corpus(tokens, np.concatenate(starts).astype(np.int64), np.concatenate(records))
    return corpus.subset(_first_of_each(corpus.records))


def _first_of_each(records: np.ndarray) -> np.ndarray:
    """Where a record is the first of its (key, temperature): [n] bool."""
    pairs = np.empty(len(records), [("key", "<u8"), ("temperature", "<f4")])
    pairs["key"], pairs["temperature"] = records["key"], records["temperature"]
    _, first = np.unique(pairs, return_index=True)
    chosen = np.zeros(len(records), bool)
    chosen[first] = True
    return chosen


def check_trainable(corpus: Corpus, *, block_size: int, row_tokens: int, name: str) -> None:
    """Refuse data that cannot train every slot of a block."""
    require(len(corpus) > 0, f"{name} is empty: there is nothing to train on")
    answers = np.minimum(corpus.lengths, row_tokens) - corpus.records["answer"]
    longest = int(answers.max(initial=0))
    require(
        longest > block_size,
        f"{name}: no answer is longer than the block: the longest within row_tokens {row_tokens} "
        f"has {max(longest, 0)} tokens, block_size {block_size} needs {block_size + 1} (the anchor "
        "and a block after it): use a shorter block or other data",
    )
