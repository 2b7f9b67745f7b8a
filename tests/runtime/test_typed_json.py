"""JSON into dataclasses: what is read, what is refused and how it says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_trt.runtime.typed_json import JsonError, canonical, from_json, read_json


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Outer:
    count: int
    rate: float
    on: bool
    inner: Inner | None
    ids: tuple[int, ...]
    notes: dict[str, object]
    extra: str = "default"

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must be >= 0, got {self.count}")


GOOD = {
    "count": 2,
    "rate": 1,
    "on": True,
    "inner": {"name": "x"},
    "ids": [1, 2],
    "notes": {"a": [None]},
}


def test_every_supported_type_is_read() -> None:
    assert from_json(Outer, GOOD, "file") == Outer(2, 1.0, True, Inner("x"), (1, 2), {"a": [None]})
    assert from_json(Outer, {**GOOD, "inner": None, "extra": "e"}, "file").inner is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": True}, "file.count must be int, got bool True"),
        ({"count": 1.0}, "file.count must be int, got float 1.0"),
        ({"count": None}, "file.count must be int, got NoneType None"),
        ({"count": -1}, "count must be >= 0, got -1"),
        ({"rate": "fast"}, "file.rate must be float, got str 'fast'"),
        ({"on": 1}, "file.on must be bool"),
        ({"inner": {"name": 3}}, "file.inner.name must be str"),
        ({"inner": []}, "file.inner must be an object"),
        ({"ids": [1, "2"]}, r"file.ids\[1\] must be int"),
        ({"ids": {}}, "file.ids must be tuple"),
        ({"notes": []}, "file.notes must be dict"),
        ({"colour": 1}, "file has unknown keys: colour"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(JsonError, match=words):
        from_json(Outer, {**GOOD, **change}, "file")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(JsonError, match="file lacks the keys: ids, rate"):
        from_json(Outer, {k: v for k, v in GOOD.items() if k not in ("ids", "rate")}, "file")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": NaN}', "NaN is not a number of JSON"),
        (b'{"a": -Infinity}', "not a number of JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" * 500_000, "nested too deeply"),
        (b'"' + b"x" * 1_000_000 + b'"', "is over 900000 bytes"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(JsonError, match=words):
        read_json(path, max_bytes=900_000)


def test_canonical_text_depends_on_the_value_alone() -> None:
    assert canonical({"b": (1, 2), "a": "é"}) == canonical({"a": "é", "b": [1, 2]})
    assert canonical({"a": 1.5}) == b'{"a":1.5}'
