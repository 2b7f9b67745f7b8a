"""The tree keeps its shape: short files and functions, links that lead somewhere."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from import_graph import source_modules

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def tracked(suffix: str) -> list[Path]:
    """The files of the repository that end in `suffix`."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", f"*{suffix}"], cwd=ROOT, capture_output=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def`, its docstring not counted."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def anchors(text: str) -> set[str]:
    """The anchors that the headings of a Markdown text make."""
    found = set()
    for heading in re.findall(r"^#+\s+(.+?)\s*$", text, flags=re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower())
        found.add(re.sub(r"\s", "-", plain))
    return found


def test_no_python_file_is_over_400_lines() -> None:
    long = {p.name: n for p in tracked(".py") if (n := p.read_text().count("\n")) > MAX_FILE_LINES}
    assert long == {}


def test_no_function_is_over_50_lines() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {lines} lines"
        for path in source_modules(ROOT).values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := body_lines(node)) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in tracked(".md"):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for match in LINK.finditer(text):
            link = match.group(1) or match.group(2)
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if not target.exists() or (
                anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())
            ):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert broken == []
