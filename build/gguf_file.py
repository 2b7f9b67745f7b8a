"""GGUF files, versions 2 and 3, little-endian: header, metadata and tensor table, read defensively.

    "GGUF" | version u32 | tensors u64 | pairs u64 | pairs | tensor table | padding | tensor data
    pair    name string, type u32, value;  string = length u64 + UTF-8;  array = type, count, items
    tensor  name string, dims u32, dim u64 each (fastest first), type u32, offset u64 into the data

The file is mapped. Every length is checked against the bytes that are left before anything of that
size is made, so a damaged or hostile file costs an error, not memory or time.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from dspark_trt.build.source import CheckpointError, check_finite

VERSIONS = (2, 3)
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY = 1 << 22  # items; the largest vocabularies and merge lists are a tenth of it
MAX_NAME = 1 << 10  # bytes of a key or of a tensor's name
MAX_TEXT = 1 << 24  # bytes of a string value
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
DEQUANTIZED_AT_ONCE = 1 << 22  # values, 16 MiB of float32
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
TENSOR_TYPES = {
    kind
    for kind in GGMLQuantizationType
    if re.fullmatch(r"B?F16|F32|Q[458]_[01]|Q[2-6]_K|IQ[1-4]_[A-Z]+|TQ[12]_0|MXFP4", kind.name)
    and kind.name not in ("Q8_1",)
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table; `shape` is slowest first: [rows, columns]."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class _Cursor:
    """A position in the mapped file; every step says what it reads, for errors."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message} (at byte {self.at}): the GGUF is corrupt")

    def take(self, count: int, what: str) -> np.ndarray:
        """The next `count` bytes, a view."""
        left = len(self.data) - self.at
        if count > left:
            raise self.fail(f"{what} needs {count} bytes, {left} are left in the file")
        view = self.data[self.at : self.at + count]
        self.at += count
        return view

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what).tobytes())[0])

    def u64(self, what: str, most: int) -> int:
        value = int(struct.unpack("<Q", self.take(8, what).tobytes())[0])
        if value > most:
            raise self.fail(f"{what} is {value}, at most {most} is read")
        return value

    def text(self, what: str, most: int) -> str:
        raw = self.take(self.u64(f"the length of {what}", most), what).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None


class GgufFile:
    """Metadata and tensor table of one file; `tensor` dequantises on demand.

    Metadata values are int, float, bool, str, numpy arrays (numbers) or lists of str.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: np.ndarray = np.memmap(path, mode="r", dtype=np.uint8)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(path, self._data)
        tensors, pairs = self._header(cursor)
        self.metadata = _metadata(cursor, pairs)
        self.tensors = self._table(cursor, tensors)

    def _header(self, cursor: _Cursor) -> tuple[int, int]:
        """Numbers of tensors and of metadata pairs."""
        if cursor.take(4, "the magic").tobytes() != b"GGUF":
            raise CheckpointError(f"{self.path} does not start with GGUF: not a GGUF file")
        version = cursor.u32("the version")
        if version not in VERSIONS:
            big = " (a big-endian file)" if version >= 1 << 24 else ""
            raise CheckpointError(
                f"{self.path}: GGUF version {version}{big} is not supported, supported are 2 "
                "and 3, little-endian"
            )
        tensors = cursor.u64("the number of tensors", MAX_TENSORS)
        return tensors, cursor.u64("the number of metadata pairs", MAX_PAIRS)

    def _table(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        rows = [self._row(cursor, index) for index in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise cursor.fail(f"general.alignment must be a power of two, got {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in rows:
            if name in tensors:
                raise cursor.fail(f"tensor {name} is listed twice")
            if offset % alignment:
                raise cursor.fail(
                    f"tensor {name} starts at {offset}, not a multiple of {alignment}"
                )
            block, width = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise cursor.fail(
                    f"tensor {name} has rows of {shape[-1]}, {kind.name} needs multiples of {block}"
                )
            size = math.prod(shape) // block * width
            if start + offset + size > len(self._data):
                raise CheckpointError(
                    f"{self.path}: tensor {name} ends at byte {start + offset + size}, the file "
                    f"has {len(self._data)}: the file is truncated, get it again"
                )
            tensors[name] = GgufTensor(name, shape, kind, start + offset, size)
        self._refuse_overlap(tensors)
        return tensors

    def _row(
        self, cursor: _Cursor, index: int
    ) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        dims = cursor.u32(f"the number of dims of {name}")
        if not 1 <= dims <= MAX_DIMS:
            raise cursor.fail(f"tensor {name} has {dims} dims, expected 1 to {MAX_DIMS}")
        # No dim can exceed the bytes of the file times the values that a byte can hold.
        most = 8 * len(self._data)
        shape = tuple(cursor.u64(f"a dim of {name}", most) for _ in range(dims))[::-1]
        kind = cursor.u32(f"the type of {name}")
        if math.prod(shape) == 0:
            raise cursor.fail(f"tensor {name} has an empty shape {list(shape)}")
        if kind not in TENSOR_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {_type_name(kind)}, supported are "
                f"{', '.join(sorted(k.name for k in TENSOR_TYPES))}"
            )
        offset = cursor.u64(f"the offset of {name}", len(self._data))
        return name, shape, GGMLQuantizationType(kind), offset

    def _refuse_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        end, before = 0, ""
        for item in sorted(tensors.values(), key=lambda t: t.offset):
            if item.offset < end:
                raise CheckpointError(f"{self.path}: tensors {before} and {item.name} overlap")
            end, before = item.offset + item.size, item.name

    def tensor(self, name: str) -> np.ndarray:
        """The float32 tensor, dequantised in chunks of rows; checked to be finite."""
        item = self.tensors[name]
        data = self._data[item.offset : item.offset + item.size]
        columns = item.shape[-1]
        rows = math.prod(item.shape[:-1])
        packed = data.reshape(rows, item.size // rows)
        values = np.empty((rows, columns), np.float32)
        step = max(1, DEQUANTIZED_AT_ONCE // columns)
        with np.errstate(all="ignore"):  # NaN and infinities are reported by name, below
            for i in range(0, rows, step):
                values[i : i + step] = dequantize(np.array(packed[i : i + step]), item.kind)
        check_finite(self.path, name, values)
        return values.reshape(item.shape)


def _type_name(kind: int) -> str:
    known = {member.value: member.name for member in GGMLQuantizationType}
    return known.get(kind, f"number {kind}")


def _metadata(cursor: _Cursor, pairs: int) -> dict[str, object]:
    values: dict[str, object] = {}
    for index in range(pairs):
        key = cursor.text(f"metadata key {index}", MAX_NAME)
        if key in values:
            raise cursor.fail(f"metadata key {key} is there twice")
        kind = cursor.u32(f"the type of {key}")
        values[key] = _array(cursor, key) if kind == ARRAY else _scalar(cursor, key, kind)
    return values


def _scalar(cursor: _Cursor, key: str, kind: int) -> object:
    if kind == STRING:
        return cursor.text(key, MAX_TEXT)
    if kind not in NUMBERS:
        raise cursor.fail(f"metadata {key} has unknown type {kind}")
    value = cursor.take(NUMBERS[kind].itemsize, key).view(NUMBERS[kind])[0].item()
    return bool(value) if kind == BOOL else value


def _array(cursor: _Cursor, key: str) -> object:
    kind = cursor.u32(f"the item type of {key}")
    count = cursor.u64(f"the number of items of {key}", MAX_ARRAY)
    if kind == ARRAY:
        raise cursor.fail(f"metadata {key} is an array of arrays, which no model has")
    if kind == STRING:
        return _strings(cursor, key, count)
    if kind not in NUMBERS:
        raise cursor.fail(f"metadata {key} has items of unknown type {kind}")
    return cursor.take(count * NUMBERS[kind].itemsize, key).view(NUMBERS[kind])


def _strings(cursor: _Cursor, key: str, count: int) -> list[str]:
    """`count` strings; a vocabulary has 100,000, so lengths are read without numpy."""
    if count * 8 > len(cursor.data) - cursor.at:
        raise cursor.fail(f"metadata {key} claims {count} strings, the file is too short")
    window = cursor.data.data[cursor.at :]
    unpack: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
    at, end = 0, len(window)
    found: list[str] = []
    for _ in range(count):
        if at + 8 > end:
            raise cursor.fail(f"metadata {key} ends after {len(found)} of {count} strings")
        (length,) = unpack(window, at)
        if length > end - at - 8 or length > MAX_TEXT:
            raise cursor.fail(f"item {len(found)} of {key} claims {length} bytes")
        try:
            found.append(str(window[at + 8 : at + 8 + length], "utf-8"))
        except UnicodeDecodeError:
            raise cursor.fail(f"item {len(found)} of {key} is not UTF-8") from None
        at += 8 + length
    cursor.at += at
    return found
