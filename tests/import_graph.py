"""The imports of the source tree, read with `ast`: what imports what, and how.

A source folder `build/` is the package `dspark_trt.build`; folders are layers. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "dspark_trt"
LAYERS = ("build", "plugins", "runtime", "tools", "triton_repo")
HEAVY = ("cuda", "matplotlib", "polygraphy", "tensorrt", "torch", "transformers", "xllamacpp")


@dataclass(frozen=True)
class Import:
    """One imported name: `target` is absolute, with the leading dots of a relative import kept."""

    target: str
    line: int
    star: bool
    deferred: bool  # inside a function: runs when that is called


def is_type_checking(node: ast.stmt) -> bool:
    """Whether `node` is `if TYPE_CHECKING:`, whose body never runs."""
    if not isinstance(node, ast.If):
        return False
    test = node.test
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def imports_of(source: str, modules: frozenset[str] = frozenset()) -> list[Import]:
    """Every import that `source` can execute; `from package import module` names the module."""
    found: list[Import] = []

    def visit(node: ast.AST, deferred: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(a.name, node.lineno, False, deferred) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                target = full if full in modules else base
                found.append(Import(target, node.lineno, alias.name == "*", deferred))
        inside = deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        children: Iterator[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and is_type_checking(node):
            children = iter(node.orelse)
        for child in children:
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def source_modules(root: Path) -> dict[str, Path]:
    """Module name -> file, of every Python file under the layers' folders of `root`."""
    modules = {}
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            modules[".".join((PACKAGE, *parts))] = path
    return modules


def tree_imports(modules: dict[str, Path]) -> dict[str, list[Import]]:
    """Module name -> its imports, each reduced to a module of ours where it names one."""
    names = frozenset(modules)
    return {
        name: imports_of(path.read_text(encoding="utf-8"), names) for name, path in modules.items()
    }


def layer_of(module: str) -> str:
    """The layer of `dspark_trt.<layer>...`."""
    return module.split(".")[1]
