"""The GGUF reader: against the `gguf` package on good files, and on damaged and hostile ones."""

from __future__ import annotations

import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from gguf_factory import byte_level_metadata, write_gguf

from dspark_trt.build import gguf_file
from dspark_trt.build.gguf_file import GgufFile
from dspark_trt.build.source import CheckpointError

STRING, ARRAY, U32, U64 = 8, 9, 4, 10


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def header(
    *, pairs: tuple[bytes, ...] = (), rows: tuple[bytes, ...] = (), version: int = 3
) -> bytes:
    counts = struct.pack("<IQQ", version, len(rows), len(pairs))
    body = b"GGUF" + counts + b"".join(pairs) + b"".join(rows)
    return body + b"\0" * (-len(body) % 32)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A whole little file: metadata of every kind, four tensors."""
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (6, 64), "b.weight": (3, 64), "c.weight": (64,), "d.weight": (2, 256)}
    kinds = {
        "a.weight": GGMLQuantizationType.Q4_1,
        "b.weight": GGMLQuantizationType.Q8_0,
        "d.weight": GGMLQuantizationType.F16,
    }
    return write_gguf(
        tmp_path / "small.gguf",
        "llama",
        config={"context_length": 512, "rope.freq_base": 1e4},
        tensors={k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()},
        tokenizer=byte_level_metadata("gpt-2", vocab=300) | {"scores": [0.5, -1.0]},
        kinds=kinds,
    )


def test_reads_what_the_gguf_package_reads(small: Path) -> None:
    ours, theirs = GgufFile(small), GGUFReader(small)
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(d) for d in tensor.shape[::-1])
        assert (mine.kind, mine.size, mine.offset) == (
            tensor.tensor_type,
            tensor.n_bytes,
            tensor.data_offset,
        )


def test_version_2_reads_like_version_3(small: Path) -> None:
    data = bytearray(small.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    small.write_bytes(data)
    assert "a.weight" in GgufFile(small).tensors


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_dequantises_in_chunks_what_was_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Three rows at a time, the last chunk shorter."""
    monkeypatch.setattr(gguf_file, "DEQUANTIZED_AT_ONCE", 3 * 96)
    values = np.random.default_rng(1).standard_normal((7, 96)).astype(np.float32)
    path, type_ = tmp_path / "x.gguf", GGMLQuantizationType[kind]
    write_gguf(path, "llama", config={}, tensors={"w": values}, tokenizer={}, kinds={"w": type_})
    expected = dequantize(quantize(values, type_), type_)
    np.testing.assert_array_equal(GgufFile(path).tensor("w"), expected)


@pytest.mark.parametrize(("kind", "scales"), [("Q4_K", (0, 2)), ("Q6_K", (208,)), ("Q2_K", (80,))])
def test_dequantises_k_blocks(tmp_path: Path, kind: str, scales: tuple[int, ...]) -> None:
    """`scales`: bytes of a block where its float16 factors stand; the rest may be anything."""
    type_ = GGMLQuantizationType[kind]
    width = GGML_QUANT_SIZES[type_][1]
    packed = np.random.default_rng(2).integers(0, 256, (5, 3, width)).astype(np.uint8)
    for at in scales:
        packed[..., at : at + 2] = np.array([0.25], np.float16).view(np.uint8)
    if kind == "Q2_K":
        packed[..., 82:84] = np.array([0.5], np.float16).view(np.uint8)
    packed = packed.reshape(5, 3 * width)
    writer = GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("w", packed, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "k.gguf")
    assert file.tensors["w"].shape == (5, 768)
    np.testing.assert_array_equal(file.tensor("w"), dequantize(packed, type_))


def test_nan_is_named(tmp_path: Path) -> None:
    values = np.ones((4, 32), np.float32)
    values[2, 7] = np.inf
    path = write_gguf(
        tmp_path / "x.gguf", "llama", config={}, tensors={"blk.0.w": values}, tokenizer={}
    )
    with pytest.raises(CheckpointError, match=r"blk\.0\.w .*\[2, 7\] \(inf\)"):
        GgufFile(path).tensor("blk.0.w")


def nested_array(levels: int) -> bytes:
    """An array whose items are arrays, `levels` deep."""
    return struct.pack("<IQ", ARRAY, 1) * levels + struct.pack("<IQ", U32, 0)


HUGE = (1 << 64) - 1
HOSTILE: dict[str, tuple[str, bytes]] = {
    "empty": ("cannot be read", b""),
    "other magic": ("does not start with GGUF", b"GGML" + bytes(60)),
    "version 1": ("version 1 is not supported", header(version=1)),
    "big-endian": ("big-endian", header(version=3 << 24)),
    "pair count": ("metadata pairs is", b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE)),
    "tensor count": ("number of tensors is", b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0)),
    "fewer pairs": ("left in the file", b"GGUF" + struct.pack("<IQQ", 3, 0, 5)),
    "key length": ("length of metadata key 0", header(pairs=(struct.pack("<Q", HUGE),))),
    "key beyond file": ("left in the file", header(pairs=(struct.pack("<Q", 1000),))),
    "key not UTF-8": ("not UTF-8", header(pairs=(text(b"\xff\xfe") + bytes(12),))),
    "text length": (
        "length of general.name",
        header(pairs=(pair("general.name", STRING, struct.pack("<Q", 1 << 50)),)),
    ),
    "unknown type": ("unknown type 77", header(pairs=(pair("k", 77, bytes(8)),))),
    "unknown item type": (
        "items of unknown type 13",
        header(pairs=(pair("k", ARRAY, struct.pack("<IQ", 13, 1)),)),
    ),
    "array count": (
        "number of items of k",
        header(pairs=(pair("k", ARRAY, struct.pack("<IQ", U32, HUGE)),)),
    ),
    "array beyond file": (
        "left in the file",
        header(pairs=(pair("k", ARRAY, struct.pack("<IQ", U64, 1 << 20)),)),
    ),
    "strings beyond file": (
        "claims 1048576 strings",
        header(pairs=(pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 20)),)),
    ),
    "string item length": (
        "item 1 of k claims",
        header(
            pairs=(
                pair(
                    "k", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + struct.pack("<Q", 999)
                ),
            )
        ),
    ),
    "nested array": ("array of arrays", header(pairs=(pair("k", ARRAY, nested_array(2)),))),
    "deep array": ("array of arrays", header(pairs=(pair("k", ARRAY, nested_array(100_000)),))),
    "key twice": (
        "there twice",
        header(pairs=(pair("k", U32, bytes(4)), pair("k", U32, bytes(4)))),
    ),
    "alignment 0": (
        "general.alignment must be a power of two",
        header(pairs=(pair("general.alignment", U32, bytes(4)),)),
    ),
    "alignment 24": (
        "general.alignment must be a power of two",
        header(pairs=(pair("general.alignment", U32, struct.pack("<I", 24)),)),
    ),
    "alignment huge": (
        "general.alignment must be a power of two",
        header(pairs=(pair("general.alignment", U32, struct.pack("<I", 1 << 31)),)),
    ),
    "no dims": ("has 0 dims", header(rows=(row("w", ()),))),
    "dims": ("has 9 dims", header(rows=(row("w", (1,) * 9),))),
    "dim huge": ("a dim of w is", header(rows=(row("w", (HUGE, HUGE)),))),
    "dims multiply": ("truncated", header(rows=(row("w", (200, 200, 200, 200)),))),
    "dim zero": ("empty shape", header(rows=(row("w", (32, 0)),))),
    "tensor type": ("has type number 999", header(rows=(row("w", (32,), kind=999),))),
    "integer tensor": ("has type I32", header(rows=(row("w", (32,), kind=26),))),
    "odd row": ("needs multiples of 32", header(rows=(row("w", (33, 1), kind=2),))),
    "offset beyond": ("offset of w is", header(rows=(row("w", (4,), offset=1 << 40),))),
    "offset unaligned": ("not a multiple of 32", header(rows=(row("w", (4,), offset=8),))),
    "truncated data": ("truncated", header(rows=(row("w", (64, 64)),)) + bytes(100)),
    "tensor twice": (
        "listed twice",
        header(rows=(row("w", (4,)), row("w", (4,), offset=32))) + bytes(64),
    ),
    "overlap": ("overlap", header(rows=(row("a", (16,)), row("b", (4,), offset=32))) + bytes(64)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_cost_one_clear_error(tmp_path: Path, case: str) -> None:
    message, data = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufFile(path)
    assert time.monotonic() - begin < 1.0
    assert "hostile.gguf" in str(caught.value)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


def mutants(data: bytes, seed: int) -> list[bytes]:
    """Truncations at many offsets, then damaged lengths, counts and single bytes."""
    rng = random.Random(seed)
    found = [data[: rng.randrange(len(data))] for _ in range(60)]
    found += [data[:n] for n in range(0, 200, 3)]
    for _ in range(250):
        at = rng.randrange(0, len(data) - 8)
        value = rng.choice([0, 1, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1])
        found.append(data[:at] + struct.pack("<Q", value) + data[at + 8 :])
    for _ in range(250):
        at = rng.randrange(0, min(len(data), 2000))
        found.append(data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :])
    return found


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("seed", range(2))
def test_no_mutation_escapes_as_another_exception(small: Path, seed: int, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "mutant.gguf"
    refused, before = 0, peak_bytes()
    for mutant in mutants(data, seed):
        path.unlink(missing_ok=True)
        path.write_bytes(mutant)
        begin = time.monotonic()
        try:
            file = GgufFile(path)
            for name in file.tensors:
                file.tensor(name)
        except CheckpointError:
            refused += 1
        assert time.monotonic() - begin < 2.0
    assert refused > 150
    assert peak_bytes() - before < 64 << 20


def test_metadata_types(small: Path) -> None:
    metadata: dict[str, Any] = GgufFile(small).metadata
    assert metadata["llama.context_length"] == 512
    assert metadata["llama.rope.freq_base"] == 1e4
    assert metadata["tokenizer.ggml.tokens"][:1] == ["<|endoftext|>"]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0]
