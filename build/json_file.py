"""JSON files of a checkpoint: bounded in size and depth, read through typed fields.

Checkpoints come from strangers, so a value of the wrong type or out of its bound is an error that
names the file, the field, the value and the bound.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from dspark_trt.build.config import ConfigError, require
from dspark_trt.build.source import CheckpointError

MAX_BYTES = 1 << 24  # of a config; files that may be larger say so
MAX_DEPTH = 64
MAX_SHOWN = 80  # characters of a value in an error
# No model is near these; a larger number is a damaged or hostile file.
MAX_COUNT = 1 << 24


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a file of at most `max_bytes`."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, at most {max_bytes} are read")
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is not UTF-8 (byte {error.start}): the file is damaged, get it again"
        ) from error


def parse_object(text: str, *, where: str, max_depth: int = MAX_DEPTH) -> dict[str, object]:
    """The JSON object in `text`; `where` names its source in errors."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise CheckpointError(
            f"{where} is nested too deep, at most {max_depth} levels are read"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a {type(value).__name__}, an object was expected")
    if _depth_exceeds(value, max_depth):
        raise CheckpointError(f"{where} is nested too deep, at most {max_depth} levels are read")
    if "\\ud" in text.lower() and not _encodes(value):
        raise CheckpointError(f"{where} holds half a surrogate pair (\\ud800..\\udfff): not a text")
    return value


def _encodes(value: object) -> bool:
    """Whether every string of a JSON value can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _depth_exceeds(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def read_object(path: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, object]:
    """The JSON object that the file `path` holds."""
    return parse_object(read_text(path, max_bytes=max_bytes), where=str(path))


def shortened(value: object) -> str:
    """`repr` of a value for an error message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class Fields:
    """Typed access to the fields of a JSON object; null counts as absent.

    Each getter raises `ConfigError` with file, field, value and bound. A `default` of None makes
    the field required.
    """

    def __init__(self, where: str, values: dict[str, object]) -> None:
        self.where = where
        self.values = values

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str) -> object:
        """The raw value, None where absent."""
        return self.values.get(name)

    def fail(self, name: str, expected: str) -> ConfigError:
        """The error for a field whose value is not what was `expected`."""
        if not self.has(name):
            return ConfigError(f"{self.where}: {name} is missing, expected {expected}")
        return ConfigError(
            f"{self.where}: {name} must be {expected}, got {shortened(self.values[name])}"
        )

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT
    ) -> int:
        """An integer in [low, high]."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number > 0."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(name, "a number > 0")
        if not (math.isfinite(value) and value > 0):
            raise self.fail(name, "a number > 0")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def integers(self, name: str) -> list[int]:
        """A list of integers."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise self.fail(name, "a list of integers")
        return value

    def section(self, name: str) -> Fields:
        """A nested object, empty where absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return Fields(f"{self.where}: {name}", value)

    def expect(self, name: str, *allowed: object) -> None:
        """Refuse a field that is there with a value other than the `allowed` ones."""
        value = self.values.get(name)
        named = " or ".join(repr(v) for v in allowed)
        require(
            value is None or any(type(value) is type(v) and value == v for v in allowed),
            f"{self.where}: {name} must be {named} (others are not supported), got "
            f"{shortened(value)}",
        )
