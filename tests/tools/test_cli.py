"""The dispatch of `dspark`: exit codes, one line per error, and when a traceback stays."""

from __future__ import annotations

import errno
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dspark_trt.runtime.engine_dir import EngineDirError
from dspark_trt.tools import cli
from dspark_trt.tools.extras import MissingExtraError, load_extra


class EngineKinError(EngineDirError):
    pass


def install(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | int) -> None:
    """Make `dspark info` raise or return `outcome`."""

    def main(argv: list[str]) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.SimpleNamespace(main=main)
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EngineDirError("x has 5 bytes"), "dspark: error: x has 5 bytes\n"),
        (EngineKinError("kin"), "dspark: error: kin\n"),
        (EngineDirError("two\nlines\x1b[31m"), "dspark: error: two lines?[31m\n"),
        (MissingExtraError("bench needs x"), "dspark: error: bench needs x\n"),
        (FileNotFoundError(2, "No such file or directory", "a.gguf"), "directory: a.gguf\n"),
        (OSError(errno.ENOSPC, "No space left on device", "w.bin"), "while writing w.bin: free"),
        (MemoryError(), "out of memory: lower the limits"),
        (MemoryError("Unable to allocate 3 GiB"), "(Unable to allocate 3 GiB)"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    words: str,
) -> None:
    install(monkeypatch, error)
    assert cli.main(["info", "x"]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("error", [ValueError("ours"), KeyError("ours"), RuntimeError("ours")])
def test_a_fault_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    install(monkeypatch, error)
    with pytest.raises(type(error), match="ours"):
        cli.main(["info", "x"])


def test_a_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EngineDirError("x"))
    with pytest.raises(EngineDirError):
        cli.main(["--traceback", "info", "x"])


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, KeyboardInterrupt())
    assert cli.main(["info"]) == 130


def test_the_code_of_the_subcommand_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 3)
    assert cli.main(["info"]) == 3


def test_a_wrong_command_names_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["biuld"]) == 2
    assert "no command 'biuld': did you mean 'build'?" in capsys.readouterr().err
    assert cli.main(["zzzz"]) == 2
    assert "there are build, info" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert "examples:" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        cli.main(["--colour"])
    assert raised.value.code == 2
    line = "dspark: error: unrecognized arguments: --colour: see dspark --help\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_wrong_usage_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main([name, "--no-such-option"])
    assert raised.value.code == 2
    out, err = capsys.readouterr()
    assert err.startswith("dspark: error: ")
    assert f": see dspark {name}" in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize("argv", ["info absent", "--version", "nonsense", "generate"])
def test_closed_streams_bring_no_traceback_and_errors_never_go_to_stdout(
    closed: str, argv: str
) -> None:
    command = f'"$0" -m dspark_trt.tools.cli {argv} {closed}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "error" not in done.stdout
    assert done.returncode == (0 if argv == "--version" else 2)


@pytest.mark.parametrize("name", sorted(cli.PLAIN_ERRORS))
def test_every_plain_error_exists(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert issubclass(getattr(importlib.import_module(module), attribute), Exception)


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_subcommand_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main([name, "--help"])
    assert raised.value.code == 0
    assert f"examples:\n  dspark {name} " in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    code = (
        "import sys, types; from dspark_trt.tools import cli\n"
        "def main(argv):\n    for i in range(100000): print('line', i)\n"
        "cli.importlib.import_module = lambda name: types.SimpleNamespace(main=main)\n"
        "sys.exit(cli.main(['info']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    errors = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=30) == 141
    assert errors == b""


def test_a_missing_extra_says_how_to_get_it() -> None:
    assert load_extra("json", extra="plot", wanted_by="--plot") is not None
    with pytest.raises(MissingExtraError, match=r"--plot needs no_such_library.*dspark-trt\[plot"):
        load_extra("no_such_library.sub", extra="plot", wanted_by="--plot")
