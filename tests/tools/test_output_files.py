"""Output files are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dspark_trt.tools.output_files import OutputError, check_output_file, write_output


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_output(str(path), b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_output(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("there")
    check_output_file(str(tmp_path / "link"))
    write_output(str(tmp_path / "link"), b"text")
    assert (tmp_path / "there").read_bytes() == b"text"
    assert (tmp_path / "link").is_symlink()


def test_stdout_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    check_output_file("-")
    check_output_file(None)
    write_output("-", "é\n".encode())
    assert capsys.readouterr().out == "é\n"


def test_places_where_no_file_can_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="not a plain file: name a file"):
        check_output_file(str(tmp_path))
    with pytest.raises(OutputError, match="make it first"):
        check_output_file(str(tmp_path / "absent" / "x"))
    with pytest.raises(OutputError, match="not a plain file"):
        check_output_file("/dev/null")


def test_what_only_the_write_would_tell_is_told_before(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written .File name too long.: name another"):
        check_output_file(str(tmp_path / ("x" * 300)))
    with pytest.raises(OutputError, match="cannot be written .File name too long"):
        check_output_file(str(tmp_path / ("x" * 250)))  # the name it has until it is whole
    with pytest.raises(OutputError, match="cannot be written .embedded null"):
        check_output_file("a\0b")
    with pytest.raises(OutputError, match="cannot be written"):
        check_output_file("/proc/x.json")  # no file can be made there, by root neither
    check_output_file(str(tmp_path / "fine"))
    assert list(tmp_path.iterdir()) == []
