"""Where a build may write: what it reads must not be what it replaces. Standard library only."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path

from dspark_trt.runtime.engine_dir import MANIFEST, EngineDirError, check_output

# What tools put beside the files that a manifest lists.
MADE_LATER = frozenset({MANIFEST, "sts.json", "cost_table.json"})
SHOWN = 3  # names in an error


def check_paths(output: Path, inputs: Mapping[str, Path | None]) -> None:
    """Refuse an output that would take something along when it is replaced; quick.

    inputs: flag -> what is read there.
    """
    try:
        output.stat()
        looped = False
    except OSError as error:
        looped = error.errno == errno.ELOOP
    if looped:
        raise EngineDirError(f"output {output} is a loop of symbolic links: name a directory")
    check_output(output)
    target = output.resolve()
    for flag, path in inputs.items():
        if path is None:
            continue
        _check_name(flag, path)
        source = path.resolve()
        if source.is_relative_to(target) or target.is_relative_to(source):
            relation = (
                "is" if source == target else "holds" if source in target.parents else "is inside"
            )
            raise EngineDirError(
                f"output {output} and {flag} {path} overlap ({flag} {relation} the output), and a "
                "build replaces its output as a whole: name a directory apart from it"
            )
    if others := _foreign_files(target):
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise EngineDirError(
            f"output {output} holds an engine and files that are not the engine's: "
            f"{', '.join(others[:SHOWN])}{more}. They would be lost: move them, or name another "
            "directory"
        )


def _check_name(flag: str, path: Path) -> None:
    try:
        name = path.resolve().name
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise EngineDirError(f"{flag} {path} cannot be read: {error}") from None
    if "\\" in name and flag != "--tokenizer":
        raise EngineDirError(
            f"{flag} {path}: the manifest keeps the name {name!r}, which must hold no backslash: "
            "rename it"
        )


def _foreign_files(target: Path) -> list[str]:
    """Files in an engine directory that its manifest does not list, in order; [] where none."""
    if not (target / MANIFEST).is_file():
        return []
    # Not read_manifest: an engine of another version may be replaced too.
    listed = json.loads((target / MANIFEST).read_bytes()).get("files")
    known = MADE_LATER | set(listed if isinstance(listed, dict) else {})
    found = (p.relative_to(target).as_posix() for p in target.rglob("*") if not p.is_dir())
    return sorted(set(found) - known)
