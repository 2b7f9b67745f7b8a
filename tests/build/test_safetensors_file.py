"""Safetensors headers: against the library on good files, and damaged or hostile ones."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dspark_trt.build.safetensors_file import SafetensorsFile, SafetensorsWeights
from dspark_trt.build.source import CheckpointError


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def test_every_float_type_reads_as_float32(tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -2.25], [3.0, 1e-3]])
    tensors = {
        "a": values,
        "b": values.to(torch.bfloat16),
        "c": values.to(torch.float16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert file.raw("b").dtype == np.dtype(ml_dtypes.bfloat16)
    weights = SafetensorsWeights(tmp_path, [file], {name: name for name in tensors})
    for name, tensor in tensors.items():
        read = weights.tensor(name)
        assert read.dtype == np.float32 and read.flags.writeable
        np.testing.assert_array_equal(read, tensor.float().numpy())
        assert weights.shape(name) == tuple(tensor.shape)


HEADERS: dict[str, tuple[str, Any, bytes]] = {
    "not JSON": ("is not valid JSON", b"{{{{", b""),
    "not UTF-8": ("header is not UTF-8", b"\xff\xff", b""),
    "list": ("holds a list", [1], b""),
    "entry": ("entry for a is damaged", {"a": 3}, b""),
    "shape": ("entry for a is damaged", {"a": entry(shape=[-1])}, bytes(8)),
    "shape float": ("entry for a is damaged", {"a": entry(shape=[2.0])}, bytes(8)),
    "shape long": ("entry for a is damaged", {"a": entry(shape=[1] * 99)}, bytes(8)),
    "span": ("entry for a is damaged", {"a": entry(span=[0])}, bytes(8)),
    "span huge": ("truncated", {"a": entry(span=[0, 1 << 60])}, bytes(8)),
    "span reversed": ("needs 8 bytes, the header gives -8", {"a": entry(span=[8, 0])}, bytes(8)),
    "size": ("needs 12 bytes, the header gives 8", {"a": entry(shape=[3])}, bytes(8)),
    "shape overflow": ("needs .* bytes", {"a": entry(shape=[1 << 40, 1 << 40])}, bytes(8)),
    "dtype": ("dtype 'Q9', supported are F32", {"a": entry(dtype="Q9")}, bytes(8)),
    "dtype type": (r"dtype \[\], supported are", {"a": entry(dtype=[])}, bytes(8)),
    "truncated": ("ends at byte .* truncated", {"a": entry()}, bytes(4)),
    "overlap": ("a and b overlap", {"a": entry(), "b": entry(span=[4, 12])}, bytes(12)),
    "deep": ("nested too deep", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", b""),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers_are_named(tmp_path: Path, case: str) -> None:
    message, header, data = HEADERS[case]
    path = raw_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_header_length_is_held_to_the_file(tmp_path: Path, length: int) -> None:
    path = raw_file(tmp_path / "bad.safetensors", {}, length=length)
    with pytest.raises(CheckpointError, match="the header claims|not valid JSON"):
        SafetensorsFile(path)


def test_no_mutation_escapes_as_another_exception(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.bfloat16)}, good)
    data, rng = good.read_bytes(), random.Random(0)
    path, refused = tmp_path / "mutant.safetensors", 0
    for i in range(600):
        mutant = bytearray(data[: rng.randrange(len(data))] if i % 3 == 0 else data)
        for _ in range(i % 4):
            if mutant:
                mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        path.unlink(missing_ok=True)
        path.write_bytes(mutant)
        try:
            file = SafetensorsFile(path)
            weights = SafetensorsWeights(path, [file], {n: n for n in file.slices})
            for name in weights.names():
                weights.tensor(name)
        except CheckpointError:
            refused += 1
    assert refused > 200
