"""The arrows between the layers, and what may be imported where and when."""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from import_graph import (
    HEAVY,
    LAYERS,
    PACKAGE,
    Import,
    imports_of,
    layer_of,
    source_modules,
    tree_imports,
)

ROOT = Path(__file__).resolve().parent.parent

# layer -> what it may import outside itself: a whole layer, or one module of it.
ARROWS: dict[str, set[str]] = {
    "plugins": set(),
    "build": {"plugins", "runtime.engine_dir"},
    "runtime": {"plugins.registry", "plugins.nvrtc"},
    "triton_repo": {"runtime"},
    "tools": {"build", "plugins", "runtime", "triton_repo"},
}
# Where heavy libraries may be imported at module level: training is made of them.
HEAVY_ALLOWED = (f"{PACKAGE}.tools.train",)


def arrow_faults(module: str, imports: list[Import]) -> list[str]:
    """The imports of `module` that leave its layer along no arrow, or are not absolute."""
    faults = []
    layer = layer_of(module)
    for item in imports:
        where = f"{module}:{item.line} imports {item.target}"
        parts = item.target.split(".")
        if item.star:
            faults.append(f"{where}.*: import names")
        if item.target.startswith(".") or parts[0] in LAYERS:
            faults.append(f"{where}: write {PACKAGE}.<folder>")
        elif parts[0] == PACKAGE:
            other = parts[1] if len(parts) > 1 else ""
            leaf = ".".join(parts[1:3])
            if other != layer and not ({other, leaf} & ARROWS[layer]):
                faults.append(f"{where}: {layer} may import {sorted(ARROWS[layer]) or 'nothing'}")
    return faults


def heavy_faults(module: str, imports: list[Import]) -> list[str]:
    """The heavy libraries that importing `module` would load."""
    if module.startswith(HEAVY_ALLOWED):
        return []
    return [
        f"{module}:{item.line} imports {item.target} at module level: import it where it is used"
        for item in imports
        if item.target.split(".")[0] in HEAVY and not item.deferred
    ]


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of `graph` as a list of nodes, or []."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def tree() -> dict[str, list[Import]]:
    return tree_imports(source_modules(ROOT))


def test_every_import_follows_an_arrow(tree: dict[str, list[Import]]) -> None:
    assert [f for module, items in tree.items() for f in arrow_faults(module, items)] == []


def test_heavy_libraries_are_imported_on_use(tree: dict[str, list[Import]]) -> None:
    assert [f for module, items in tree.items() for f in heavy_faults(module, items)] == []


def test_modules_form_no_cycle(tree: dict[str, list[Import]]) -> None:
    graph = {m: {i.target for i in items if i.target in tree} for m, items in tree.items()}
    assert cycle_in(graph) == []


def test_package_files_hold_a_docstring_only() -> None:
    for module, path in source_modules(ROOT).items():
        if path.name == "__init__.py":
            assert len(path.read_text().strip().split('"""')) == 3, f"{module}: a docstring only"
            assert path.read_text().strip().endswith('"""'), f"{module}: a docstring only"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dspark_trt.plugins.op", "from dspark_trt.runtime.ragged import layout"),
        ("dspark_trt.runtime.llm", "from dspark_trt.build.config import TargetDims"),
        ("dspark_trt.runtime.llm", "def f():\n    import dspark_trt.plugins.attention"),
        ("dspark_trt.build.target", "from dspark_trt.runtime import llm"),
        ("dspark_trt.triton_repo.model", "import dspark_trt.tools.cli"),
        ("dspark_trt.tools.build", "from . import cli"),
        ("dspark_trt.tools.build", "from build.config import TargetDims"),
        ("dspark_trt.tools.build", "import dspark_trt"),
        ("dspark_trt.build.target", "from dspark_trt.build.config import *"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str) -> None:
    assert arrow_faults(module, imports_of(line, frozenset({"dspark_trt.runtime.llm"})))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dspark_trt.build.target", "from dspark_trt.runtime import engine_dir"),
        ("dspark_trt.build.target", "from dspark_trt.runtime.engine_dir import Manifest"),
        ("dspark_trt.runtime.engine", "from dspark_trt.plugins.registry import register_all"),
        ("dspark_trt.tools.bench", "def f():\n    import dspark_trt.runtime.llm"),
    ],
)
def test_a_right_import_passes(module: str, line: str) -> None:
    assert not arrow_faults(module, imports_of(line, frozenset({"dspark_trt.runtime.engine_dir"})))


def test_heavy_imports_are_told_by_where_they_stand() -> None:
    at_top = "try:\n    import torch.nn\nexcept ImportError:\n    torch = None"
    in_function = "def plot():\n    from matplotlib import pyplot"
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"
    assert heavy_faults("dspark_trt.tools.bench", imports_of(at_top))
    assert not heavy_faults("dspark_trt.tools.train.loop", imports_of(at_top))
    assert not heavy_faults("dspark_trt.tools.bench", imports_of(in_function))
    assert not heavy_faults("dspark_trt.tools.bench", imports_of(for_types))


def test_a_cycle_is_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})


BLOCK = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is not part of the base install")
sys.meta_path.insert(0, Block())
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120
    )


def test_every_module_imports_from_the_base_install() -> None:
    names = [
        name
        for name in source_modules(ROOT)
        if layer_of(name) != "triton_repo" and not name.startswith(HEAVY_ALLOWED)
    ]
    code = BLOCK.format(blocked=HEAVY) + f"for name in {names!r}: importlib.import_module(name)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["build", "--help"], ["generate", "--help"], ["bench", "--help"]],
)
def test_help_is_quick_since_it_loads_no_engine(argv: list[str]) -> None:
    blocked = (*HEAVY, "gguf", "numpy", "onnx", "onnxruntime", "safetensors", "tokenizers")
    done = run_python(
        BLOCK.format(blocked=blocked) + f"from dspark_trt.tools.cli import main; main({argv!r})"
    )
    assert done.returncode == 0, done.stderr
    assert "dspark" in done.stdout
