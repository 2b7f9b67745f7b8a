"""Files that are whole or not there: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

STDOUT = "-"


class OutputError(ValueError):
    """An output file cannot be written where it was asked for."""


def check_output_file(path: str | None) -> None:
    """Refuse, before any work, a place where no file can be put; None and `-` are fine."""
    if path is None or path == STDOUT:
        return
    try:
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            raise OutputError(f"output {path} is not a plain file: name a file, or - for stdout")
        if not target.parent.is_dir():
            raise OutputError(
                f"output {path}: there is no directory {target.parent}: make it first"
            )
        beside = _beside(target)
        with beside.open("xb"):
            beside.unlink()
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, OutputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"output {path} cannot be written ({reason}): name another") from None


def _beside(target: Path) -> Path:
    """Where `target` is written before it takes its name."""
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def write_output(path: str, data: bytes) -> None:
    """Write `data` to the file `path`, or to stdout for `-`; the old file stays on an error."""
    if path == STDOUT:
        sys.stdout.write(data.decode("utf-8"))
        sys.stdout.flush()
        return
    target = Path(path).resolve()
    beside = _beside(target)
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
