"""A directory is replaced whole or not at all, and nothing is left beside it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_trt.runtime import directory_swap
from dspark_trt.runtime.directory_swap import clear_stale, exchange, staged_directory


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def fill(target: Path, text: str) -> None:
    with staged_directory(target) as path:
        (path / "a").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_is_made_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(directory_swap, "exchange", lambda a, b: False)
    target = tmp_path / "new" / "deeper" / "engine"
    for text in ("one", "two"):
        fill(target, text)
        assert (target / "a").read_text() == text
        assert names(target.parent) == ["engine"]


def test_the_kernel_swaps_two_directories_in_one_step(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "x", tmp_path / "y"):
        pytest.skip("this filesystem has no RENAME_EXCHANGE")
    assert names(tmp_path / "x") == ["y"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "x", tmp_path / "absent")


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        fill(tmp_path / "engine", "x")
    finally:
        os.umask(old)
    assert (tmp_path / "engine").stat().st_mode & 0o777 == 0o755


def test_an_error_leaves_the_old_one_and_no_trace(tmp_path: Path) -> None:
    fill(tmp_path / "engine", "old")
    with pytest.raises(KeyboardInterrupt), staged_directory(tmp_path / "engine") as path:
        (path / "a").write_text("new")
        raise KeyboardInterrupt
    assert (tmp_path / "engine" / "a").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_an_error_removes_the_parents_made_for_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_directory(tmp_path / "p" / "q" / "engine"):
        raise RuntimeError
    assert names(tmp_path) == []


def test_the_old_one_returns_when_the_second_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "engine", "old")
    monkeypatch.setattr(directory_swap, "exchange", lambda a, b: False)
    rename = os.rename

    def failing(source: Path, to: Path) -> None:
        if ".tmp-" in str(source) and not Path(to).exists():
            raise PermissionError(1, "no")
        rename(source, to)

    monkeypatch.setattr(directory_swap.os, "rename", failing)
    with pytest.raises(PermissionError):
        fill(tmp_path / "engine", "new")
    assert (tmp_path / "engine" / "a").read_text() == "old"
    assert names(tmp_path) == ["engine"]


def test_only_stale_directories_of_this_target_are_removed(tmp_path: Path) -> None:
    gone, alive = dead_pid(), os.getppid()
    stale = f".engine.tmp-{gone}-0123abcd"
    kept = [
        f".engine.tmp-{alive}-0123abcd",  # locked, its process runs
        f".engine.tmp-{gone}-0123abcg",  # not our pattern
        f".engine2.tmp-{gone}-0123abcd",  # of another target
        f".engine.tmp-{gone}-11111111",  # locked: its process runs in another container
    ]
    for name in (stale, *kept):
        (tmp_path / name).mkdir()
    (tmp_path / f".engine.tmp-{gone}-22222222").write_text("a file")
    (tmp_path / f".engine.tmp-{gone}-33333333").symlink_to(tmp_path / kept[0])
    locks = [os.open(tmp_path / kept[i], os.O_RDONLY) for i in (0, 3)]
    try:
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_EX)
        clear_stale(tmp_path / "engine")
    finally:
        for lock in locks:
            os.close(lock)
    assert stale not in names(tmp_path)
    assert len(names(tmp_path)) == len(kept) + 2


def test_an_old_one_set_aside_by_a_killed_process_is_put_back(tmp_path: Path) -> None:
    aside = tmp_path / f".engine.old-{dead_pid()}-0123abcd"
    aside.mkdir()
    (aside / "a").write_text("old")
    clear_stale(tmp_path / "engine")
    assert (tmp_path / "engine" / "a").read_text() == "old"
    aside.mkdir()
    clear_stale(tmp_path / "engine")
    assert names(tmp_path) == ["engine"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_the_lock_decides_and_the_process_id_only_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """Process ids are given again in the next container: a running one may be a stranger's."""
    of_another = f".engine.tmp-{os.getppid()}-0123abcd"
    of_mine = f".engine.tmp-{os.getpid()}-0123abcd"
    for name in (of_another, of_mine):
        (tmp_path / name).mkdir()
    if not has_locks:

        def unsupported(handle: int, operation: int) -> None:
            raise OSError(errno.ENOTSUP, "no locks here")

        monkeypatch.setattr(directory_swap.fcntl, "flock", unsupported)
    clear_stale(tmp_path / "engine")
    assert names(tmp_path) == ([] if has_locks else [of_another])


def test_a_directory_taken_away_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, taken = os.mkdir, []

    def removed_at_once(path: Path) -> None:
        mkdir(path)
        if not taken:
            taken.append(path)
            os.rmdir(path)

    monkeypatch.setattr(directory_swap.os, "mkdir", removed_at_once)
    fill(tmp_path / "engine", "x")
    assert taken
    assert names(tmp_path) == ["engine"]
