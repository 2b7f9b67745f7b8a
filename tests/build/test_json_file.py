"""JSON files: bounded, typed, and every fault named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark_trt.build.config import ConfigError
from dspark_trt.build.json_file import Fields, parse_object, read_object
from dspark_trt.build.source import CheckpointError

DEEP = 100_000
BAD = {
    b"": "is not valid JSON",
    b"{": "is not valid JSON",
    b"[1]": "holds a list, an object was expected",
    b"\xff{}": r"is not UTF-8 \(byte 0\)",
    b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}": "nested too deep",
    b'{"a":' + b"[" * 90 + b"]" * 90 + b"}": "nested too deep, at most 64",
    b'{"a": "\\uD83D\\ude42 \\uD83D"}': "half a surrogate pair",
    b'{"a": ' + b"9" * 5000 + b"}": "is not valid JSON",
}


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_bad_files_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=BAD[data]) as caught:
        read_object(path)
    assert "config.json" in str(caught.value)


def test_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_object(path, max_bytes=8) == {"a": 1}
    with pytest.raises(CheckpointError, match="has 8 bytes, at most 7 are read"):
        read_object(path, max_bytes=7)


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_object(path)


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_object('{"a": "\\ud83d\\ude42"}', where="x") == {"a": "\U0001f642"}


def test_wide_objects_are_fine() -> None:
    text = '{"a": [' + ",".join(["[[]]"] * 10_000) + "]}"
    assert len(parse_object(text, where="x")["a"]) == 10_000  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("getter", "value", "expected"),
    [
        ("integer", True, "an integer in"),
        ("integer", 1.0, "an integer in"),
        ("integer", 0, "an integer in"),
        ("integer", 1 << 40, "an integer in"),
        ("number", float("nan"), "a number > 0"),
        ("number", float("inf"), "a number > 0"),
        ("number", True, "a number > 0"),
        ("number", -1, "a number > 0"),
        ("boolean", 1, "true or false"),
        ("text", 1, "a string"),
        ("integers", [1, True], "a list of integers"),
        ("integers", 3, "a list of integers"),
        ("section", [], "an object"),
    ],
)
def test_wrong_values_are_named(getter: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"f\.json: x must be {expected}"):
        getattr(Fields("f.json", {"x": value}), getter)("x")


@pytest.mark.parametrize("getter", ["integer", "number", "boolean", "text", "integers"])
@pytest.mark.parametrize("values", [{}, {"x": None}])
def test_required_fields_are_named(getter: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"f\.json: x is missing"):
        getattr(Fields("f.json", values), getter)("x")


def test_defaults_stand_in_for_null() -> None:
    fields = Fields("f.json", {"x": None})
    assert (fields.integer("x", 0), fields.number("x", 0.5), fields.boolean("x", False)) == (
        0,
        0.5,
        False,
    )
    assert fields.text("y", "") == ""
    assert fields.section("x").values == {}


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        Fields("f.json", {"x": ["a"] * 10_000}).integer("x")
    assert len(str(caught.value)) < 200


def test_expect_tells_true_from_one() -> None:
    Fields("f", {"x": 1.0}).expect("x", 1.0, 1)
    Fields("f", {}).expect("x", True)
    with pytest.raises(ConfigError, match="x must be True .*got 1"):
        Fields("f", {"x": 1}).expect("x", True)
