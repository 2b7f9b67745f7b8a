"""Libraries outside the base install, loaded on use."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A library that an option needs is not installed; the message says how to get it."""


def load_extra(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import `module`; `MissingExtraError` naming the extra of dspark-trt that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{wanted_by} needs {module.split('.')[0]}, which did not load ({error}): "
            f"pip install 'dspark-trt[{extra}]'"
        ) from error
