"""Size and SHA-256 of files, in one pass over their bytes. Standard library only."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str  # 64 lower-case hexadecimal digits


def sha256_file(path: Path) -> FileEntry:
    """Size and hash of a file, streamed."""
    with path.open("rb", buffering=0) as file:
        return sha256_open(file)


def sha256_open(file: RawIOBase) -> FileEntry:
    """Size and hash of what is left of an open file, streamed."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        size += count
    return FileEntry(size, digest.hexdigest())


class HashingWriter:
    """A binary file that is hashed as it is written, from front to back."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append any contiguous buffer (a numpy array's `.data` too); the bytes written."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._digest.update(view)
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def entry(self) -> FileEntry:
        """Size and hash of what was written so far."""
        return FileEntry(self._size, self._digest.hexdigest())
