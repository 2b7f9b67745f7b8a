"""A directory held open: its files stay those of one directory, also while its name changes hands.

Names are resolved from the open directory, one part after another, and links are not followed.
Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path, PurePosixPath

FOLDER = os.O_RDONLY | os.O_DIRECTORY
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not make the reader wait


class HeldDirectory:
    """The directory that was at `path` when it was opened. Raises `OSError` as the system does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = os.open(path, FOLDER)

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def is_at_its_path(self) -> bool:
        """Whether `path` still names this directory. Its inode cannot be another's while held."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self._handle))

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[RawIOBase]:
        """The plain file `name`, given as a relative path, unbuffered; an `OSError` for others."""
        *folders, last = PurePosixPath(name).parts
        with contextlib.ExitStack() as stack:
            parent = self._handle
            for folder in folders:
                parent = os.open(folder, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
                stack.callback(os.close, parent)
            handle = os.open(last, FILE, dir_fd=parent)
            file = stack.enter_context(open(handle, "rb", buffering=0))
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileNotFoundError(2, "no plain file", str(self.path / name))
            yield file
