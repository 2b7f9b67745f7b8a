"""What is installed is what is in the tree: the wheel, the editable install, the package map."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from import_graph import LAYERS, source_modules

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

# Run where the tree is not: every package of the map is found, and the command answers.
PROBE = """
import importlib, os, subprocess, sys
for name in {packages!r}:
    importlib.import_module(name)
import dspark_trt.runtime.engine_dir as engine_dir
import dspark_trt.build.config
print(os.path.dirname(engine_dir.__file__))
command = os.path.join(os.path.dirname(sys.executable), "dspark")
print(subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout)
"""


def packages() -> list[str]:
    """The packages that the tree holds: folders with an __init__.py."""
    return sorted(m for m, path in source_modules(ROOT).items() if path.name == "__init__.py")


def data_files() -> list[str]:
    """Files beside the sources that the wheel must carry, as paths below `dspark_trt/`."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for layer in LAYERS
        for suffix in ("*.cu", "*.cuh", "*.json", "*.txt")
        for path in (ROOT / layer).rglob(suffix)
    )


def test_every_package_is_in_both_tables_of_the_map() -> None:
    for name in packages():
        folder = name.removeprefix("dspark_trt.").replace(".", "/")
        assert f'    "{name}",\n' in SETTINGS, f"{name}: add it to tool.setuptools.packages"
        assert f'"{name}" = "{folder}"\n' in SETTINGS, f"{name}: add it to package-dir"


def test_type_checkers_see_every_layer() -> None:
    for layer in LAYERS:
        if (ROOT / layer).is_dir():
            link = ROOT / "typings" / "dspark_trt" / layer
            assert link.resolve() == ROOT / layer


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new virtual environment that borrows this one's libraries."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    library = next((folder / "lib").iterdir()) / "site-packages"
    here = [path for path in sys.path if path.endswith("site-packages")]
    # Only the paths: their .pth files, so this tree's own editable install, stay unread.
    (library / "borrowed.pth").write_text("\n".join(here))
    return folder / "bin" / "python"


def install(python: Path, *what: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    options = ["install", "--no-deps", "--force-reinstall", "--quiet"]
    subprocess.run([*pip, *options, *what], check=True)


def probe(python: Path, cwd: Path) -> list[str]:
    done = subprocess.run(
        [python, "-c", PROBE.format(packages=packages())],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package_and_works_elsewhere(
    environment: Path, tmp_path: Path
) -> None:
    # From a copy: setuptools keeps what it once built, so a file deleted since would be packed.
    left_out = shutil.ignore_patterns(".*", "engines", "dist", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=left_out, symlinks=True)
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    subprocess.run([*pip_wheel, str(tree), "--wheel-dir", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("dspark_trt-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = [path.relative_to(ROOT).as_posix() for path in source_modules(ROOT).values()]
    expected = {f"dspark_trt/{name}" for name in (*sources, *data_files())}
    inside = {name for name in held if not name.split("/")[0].endswith(".dist-info")}
    assert inside == expected
    assert any(name.endswith("licenses/LICENSE") for name in held)
    install(environment, str(wheel))
    where, version, *_ = probe(environment, tmp_path)
    assert str(environment.parent.parent) in where
    assert version.startswith("dspark ")


@pytest.mark.slow
def test_an_editable_install_sees_the_tree_from_elsewhere(
    environment: Path, tmp_path: Path
) -> None:
    install(environment, "-e", str(ROOT))
    where, version, *_ = probe(environment, tmp_path)
    assert where == str(ROOT / "runtime")
    assert version.startswith("dspark ")
