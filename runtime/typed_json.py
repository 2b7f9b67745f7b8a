"""JSON files read into frozen dataclasses: every key known, every value of the declared type.

Standard library only. Used for every JSON file that one process writes and another one trusts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class JsonError(ValueError):
    """A JSON file cannot be read, or a value in it is not what its field asks for."""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def read_json(path: Path, *, max_bytes: int) -> Any:
    """The value in the file `path`; `JsonError` if that is over `max_bytes` or not UTF-8 JSON."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    return parse_json(data, path, max_bytes=max_bytes)


def parse_json(data: bytes, path: Path, *, max_bytes: int) -> Any:
    """The value in `data`, which was read from `path`; `JsonError` as of `read_json`."""
    if len(data) > max_bytes:
        raise JsonError(f"{path} is over {max_bytes} bytes: this is not a file of ours")
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except RecursionError:
        raise JsonError(f"{path} is nested too deeply: this is not a file of ours") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise JsonError(f"{path} is not valid JSON: {error}") from None


def canonical(value: Any) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def from_json(cls: type[T], data: Any, where: str) -> T:
    """An instance of the dataclass `cls` from a JSON object; `where` names it in errors.

    Keys must be exactly the fields (those with a default may be absent). Raises `JsonError`, also
    for what `__post_init__` refuses.
    """
    if not isinstance(data, dict):
        raise JsonError(f"{where} must be an object, got {_named(data)}")
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, cls))}
    if unknown := sorted(set(data) - set(fields)):
        raise JsonError(f"{where} has unknown keys: {', '.join(unknown)}")
    required = {name for name, field in fields.items() if _is_required(field)}
    if missing := sorted(required - set(data)):
        raise JsonError(f"{where} lacks the keys: {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    values = {name: _value(hints[name], data[name], f"{where}.{name}") for name in data}
    try:
        return cls(**values)
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"{where}: {error}") from None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _named(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint`: a scalar, `dict[str, X]`, `tuple[X, ...]`, `X | None` or a dataclass."""
    if hint in (Any, object):
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        (hint,) = (arg for arg in args if arg is not type(None))
        return _value(hint, value, where)
    if origin is dict and isinstance(value, dict):
        return {key: _value(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(Any, hint), value, where)
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value) is hint:
        return value
    expected = getattr(origin or hint, "__name__", str(hint))
    raise JsonError(f"{where} must be {expected}, got {_named(value)}")
