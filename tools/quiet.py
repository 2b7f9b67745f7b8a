"""Libraries that talk while they load, kept quiet."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop what libraries write to stderr while they load, native code's too."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation, ValueError):
        with contextlib.redirect_stderr(io.StringIO()):
            yield
        return
    sys.stderr.flush()
    kept = os.dup(number)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), number)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, number)
        os.close(kept)
