"""Safetensors files: the header checked in full at opening, tensors mapped one at a time.

Layout: 8 bytes little-endian header length, the JSON header {name: {dtype, shape, data_offsets}},
the data. Every slice must lie in the file, have the size its shape calls for and overlap no other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from dspark_trt.build.json_file import MAX_DEPTH, parse_object, read_object
from dspark_trt.build.source import CheckpointError, WeightSource, check_finite

MAX_HEADER = 100_000_000  # bytes; the format's own limit
MAX_DIMS = 8
FLOAT_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPES = FLOAT_DTYPES | {"I8": np.dtype(np.int8)}
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one tensor lies: `offset` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class SafetensorsFile:
    """One file: `slices` by name and its `metadata`; data is read by `raw` alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header, start = self._header(file.read(8), size)
                header_text = file.read(header)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        try:
            text = header_text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: the header is not UTF-8: not safetensors") from error
        entries = parse_object(text, where=f"{path}: header", max_depth=MAX_DEPTH)
        metadata = entries.pop("__metadata__", {})
        self.metadata: dict[str, object] = metadata if isinstance(metadata, dict) else {}
        self.slices = {
            name: self._slice(name, entry, start, size) for name, entry in entries.items()
        }
        self._refuse_overlap()
        self._map: np.ndarray | None = None

    def _header(self, prefix: bytes, size: int) -> tuple[int, int]:
        """Length of the header and the offset of the data, both in bytes."""
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes, the file has {size}: the file is "
                "truncated or not safetensors, get it again"
            )
        return length, 8 + length

    def _slice(self, name: str, entry: object, start: int, size: int) -> Slice:
        fields = entry if isinstance(entry, dict) else {}
        shape = _counts(fields.get("shape"), MAX_DIMS)
        span = _counts(fields.get("data_offsets"), 2)
        if shape is None or span is None or len(span) != 2:
            raise CheckpointError(f"{self.path}: the header's entry for {name} is damaged: {entry}")
        dtype = fields.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} has dtype {dtype!r}, supported are "
                f"{', '.join(FLOAT_DTYPES)}: save the model again in one of them"
            )
        begin, end = span
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if start + end > size:
            raise CheckpointError(
                f"{self.path}: tensor {name} ends at byte {start + end}, the file has {size}: "
                "the file is truncated, get it again"
            )
        if end - begin != expected:
            raise CheckpointError(
                f"{self.path}: tensor {name} of shape {list(shape)} and dtype {dtype} needs "
                f"{expected} bytes, the header gives {end - begin}"
            )
        return Slice(dtype, shape, start + begin, expected)

    def _refuse_overlap(self) -> None:
        end, before = 0, ""
        for name, item in sorted(self.slices.items(), key=lambda pair: pair[1].offset):
            if item.offset < end and item.size:
                raise CheckpointError(f"{self.path}: tensors {before} and {name} overlap")
            end, before = max(end, item.offset + item.size), name

    def raw(self, name: str) -> np.ndarray:
        """The tensor in its own dtype, mapped from the file (not copied)."""
        item = self.slices[name]
        if item.size == 0:
            return np.zeros(item.shape, DTYPES[item.dtype])
        if self._map is None:
            self._map = np.memmap(self.path, mode="r", dtype=np.uint8)
        data = self._map[item.offset : item.offset + item.size]
        return data.view(DTYPES[item.dtype]).reshape(item.shape)


def _counts(value: object, most: int) -> tuple[int, ...] | None:
    """`value` as a tuple if it is a list of at most `most` integers in [0, 2^63), else None."""
    if not isinstance(value, list) or len(value) > most:
        return None
    return tuple(value) if all(type(i) is int and 0 <= i < 1 << 63 for i in value) else None


class SafetensorsWeights:
    """The tensors of one or more files under canonical names: a `WeightSource`."""

    def __init__(self, path: Path, files: list[SafetensorsFile], where: dict[str, str]) -> None:
        """`where` maps each canonical name to its name in the files."""
        self.path = path
        self._where: dict[str, tuple[SafetensorsFile, str]] = {}
        owner = {name: file for file in files for name in file.slices}
        for canonical, stored in where.items():
            self._where[canonical] = (owner[stored], stored)

    def names(self) -> list[str]:
        """Every tensor, in order of name."""
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name`."""
        file, stored = self._where[name]
        return file.slices[stored].shape

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor, checked to be finite; a new array."""
        file, stored = self._where[name]
        values = np.array(file.raw(stored), dtype=np.float32)
        check_finite(file.path, stored, values)
        return values

    def mapped(self, name: str) -> np.ndarray:
        """The tensor in the file's own dtype, mapped and unchecked."""
        file, stored = self._where[name]
        return file.raw(stored)


def mapped_or_read(weights: WeightSource, name: str) -> np.ndarray:
    """The values of a tensor, without a copy where the file holds them as they are."""
    if type(weights) is SafetensorsWeights:
        return weights.mapped(name)
    return weights.tensor(name)


def main_dtype(files: list[SafetensorsFile]) -> str:
    """Name of the dtype that most bytes of the files have."""
    totals: dict[str, int] = {}
    for file in files:
        for item in file.slices.values():
            totals[item.dtype] = totals.get(item.dtype, 0) + item.size
    return DTYPE_NAMES[max(totals, key=lambda dtype: totals[dtype])] if totals else "float32"


def require_floats(files: list[SafetensorsFile]) -> None:
    """Refuse integer tensors, by name: they would need scales that this format has no place for."""
    for file in files:
        for name, item in file.slices.items():
            if item.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{file.path}: tensor {name} has dtype {item.dtype}, expected one of "
                    f"{', '.join(FLOAT_DTYPES)}: quantised checkpoints of this format are not "
                    "supported, give the original one (dspark build --quantize makes it small)"
                )


def open_shards(folder: Path) -> list[SafetensorsFile]:
    """The safetensors files of a folder: model.safetensors, or the shards its index lists."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        return _open_indexed(folder, index)
    if single.is_file():
        return [SafetensorsFile(single)]
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if found:
        raise CheckpointError(
            f"{folder} has {', '.join(found[:3])} but neither {single.name} nor {index.name}: "
            "the index of the shards is missing"
        )
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    if pickled:
        raise CheckpointError(
            f"{folder} has {pickled[0]} only: pickled weights can run code and are not read; "
            "save the model again with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} has no {single.name} and no {index.name}: no weights to read")


def _open_indexed(folder: Path, index: Path) -> list[SafetensorsFile]:
    """The shards of model.safetensors.index.json, each holding exactly what the index says."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    shards: dict[str, SafetensorsFile] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard:
            raise CheckpointError(
                f"{index}: weight_map[{tensor!r}] must name a file of this folder, got {shard!r}"
            )
        if shard not in shards:
            if not (folder / shard).is_file():
                raise CheckpointError(
                    f"{folder / shard} is missing: {index.name} puts {tensor} there"
                )
            shards[shard] = SafetensorsFile(folder / shard)
        if tensor not in shards[shard].slices:
            raise CheckpointError(f"{folder / shard} lacks {tensor}, which {index.name} puts there")
    for shard, file in shards.items():
        for tensor in file.slices:
            if weight_map.get(tensor) != shard:
                raise CheckpointError(f"{file.path}: tensor {tensor} is not in {index.name}")
    return list(shards.values())


def canonical_names(files: list[SafetensorsFile]) -> dict[str, str]:
    """Canonical name -> stored name: without the leading `model.`, without old rotary buffers."""
    where: dict[str, str] = {}
    for file in files:
        for stored in file.slices:
            if stored.endswith("rotary_emb.inv_freq"):
                continue  # a buffer that old releases of Transformers saved, made from rope_theta
            name = stored.removeprefix("model.")
            if name in where:
                raise CheckpointError(
                    f"{file.path}: tensors {where[name]} and {stored} are both {name}"
                )
            where[name] = stored
    return where
