"""Progress bars on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any


def progress_bar(total: int, unit: str) -> Any:
    """A tqdm bar to be used in a `with`; silent where stderr is no terminal."""
    from tqdm import tqdm

    visible = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return tqdm(total=total, unit=unit, leave=False, disable=not visible)
