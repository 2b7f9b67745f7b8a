"""Killed at any moment, read while replaced, out of space: there is always one whole engine."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dspark_trt.runtime.engine_dir import open_engine_dir

# Writes engines whose two files must agree; `pause` says where to stop and wait for the kill.
WRITER = """
import sys, time
from pathlib import Path
from dspark_trt.runtime import directory_swap
from dspark_trt.runtime.engine_dir import (
    CheckpointInfo, EngineDirError, Limits, Manifest, open_engine_dir, write_engine_dir
)

def wait():
    print("waiting", flush=True)
    time.sleep(60)

def write(output, text, pause=None):
    with write_engine_dir(Path(output)) as staged:
        (staged.path / "a").write_text(text)
        if pause == "half":
            wait()
        with staged.create("b") as file:
            file.write(text.encode())
        staged.describe(Manifest(
            dspark_version="0", versions={}, created="", backend="tensorrt", dtype="float32",
            quantize="none", checkpoint=CheckpointInfo("m", "gguf", "", "f32"), target={
                "num_layers": 1, "vocab_size": 9, "eos_token_ids": [],
                "layer": {"num_kv_heads": 1, "head_dim": 2}},
            limits=Limits(1, 1, 1, 1), page_size=32))
        if pause == "before swap":
            directory_swap._take_place = lambda staged, target: wait()
        if pause == "after swap":
            directory_swap.sync = lambda path: wait() if path == Path(output).parent else None
"""


def start(code: str, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + textwrap.dedent(code), *argv],
        stdout=subprocess.PIPE,
        text=True,
    )


def run(code: str, *argv: str) -> None:
    with start(code, *argv) as child:
        assert child.wait(timeout=60) == 0


def kill_when_waiting(child: subprocess.Popen[str], number: signal.Signals) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(number)
    child.wait(timeout=30)


def state(engine: Path) -> str:
    """The text that both files of a whole engine hold."""
    opened = open_engine_dir(engine)
    texts = {opened.file(name).read_text() for name in ("a", "b")}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("pause", "expected"), [("half", "old"), ("before swap", "old"), ("after swap", "new")]
)
def test_a_killed_build_leaves_a_whole_engine(
    tmp_path: Path, pause: str, expected: str, number: signal.Signals
) -> None:
    engine = tmp_path / "engine"
    run("write(sys.argv[1], 'old')", str(engine))
    with start("write(sys.argv[1], 'new', sys.argv[2])", str(engine), pause) as child:
        kill_when_waiting(child, number)
    assert state(engine) == expected
    left = [path.name for path in tmp_path.iterdir() if path.name != "engine"]
    assert len(left) == (1 if number == signal.SIGKILL else 0)
    run("write(sys.argv[1], 'again')", str(engine))
    assert state(engine) == "again"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_killed_before_the_first_engine_leaves_none(tmp_path: Path) -> None:
    with start("write(sys.argv[1], 'new', 'half')", str(tmp_path / "engine")) as child:
        kill_when_waiting(child, signal.SIGKILL)
    assert not (tmp_path / "engine").exists()


def test_a_reader_sees_one_engine_or_the_other_while_it_is_replaced(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    run("write(sys.argv[1], 'x')", str(engine))
    code = """
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for text in ("first", "second and longer"):
            write(sys.argv[1], text)
    """
    reads = 0
    with start(code, str(engine)) as child:
        while child.poll() is None:
            open_engine_dir(engine)
            reads += 1
            time.sleep(0.001)
    assert child.returncode == 0
    assert reads > 20


def test_two_builds_at_once_both_end_and_the_engine_is_one_of_them(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    code = "for _ in range(30): write(sys.argv[1], sys.argv[2])"
    with start(code, str(engine), "one") as one, start(code, str(engine), "two") as two:
        assert [child.wait(timeout=60) for child in (one, two)] == [0, 0]
    assert state(engine) in ("one", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_full_filesystem_leaves_the_old_engine(tmp_path: Path) -> None:
    """On a 1 MB tmpfs in a mount namespace of its own."""
    mount = f"mount -t tmpfs -o size=1m none '{tmp_path}' && exec \"$@\""
    namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"]).returncode != 0:
        pytest.skip("this system makes no mount namespaces")
    code = """
    output = Path(sys.argv[1], "engine")
    write(output, "old")
    try:
        write(output, "x" * 600_000)
    except EngineDirError as error:
        assert "No space left" in str(error) and "unchanged" in str(error), error
    else:
        raise SystemExit("it fitted")
    assert open_engine_dir(output).file("a").read_text() == "old"
    assert [path.name for path in output.parent.iterdir()] == ["engine"]
    """
    command = [*namespace, sys.executable, "-c", WRITER + textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(command).returncode == 0
