"""A directory that is written beside its place and takes it in one step, or never.

1. Make `.NAME.tmp-PID-XXXXXXXX` beside the target (same filesystem) and lock it.
2. The caller fills it.
3. Swap: a plain rename where there is no target yet, else Linux's `renameat2(RENAME_EXCHANGE)`, so
   that at every moment the target is a whole directory, the old one or the new one.
4. Remove what the temporary name holds now: the old directory, or on an error the unfinished one.

A process killed outright leaves its temporary directory; the next one for the same target removes
it, once its lock is gone with the process. Only where the filesystem has no locks does the process
id in the name decide, which means nothing between containers. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

AT_FDCWD = -100
RENAME_EXCHANGE = 2
# What a kernel or a filesystem without RENAME_EXCHANGE answers.
NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


@contextlib.contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield a new empty directory that takes the place of `target` when the block ends well.

    On any exception, SIGTERM and SIGHUP included, `target` stays as it was. `OSError` as raised.
    """
    clear_stale(target)
    made = _make_parents(target.parent)
    try:
        with _termination_as_exit(), contextlib.ExitStack() as stack:
            staged = _make_locked(target, stack)
            yield staged
            _take_place(staged, target)
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: another process uses it
                folder.rmdir()
        raise


def sync_tree(root: Path) -> None:
    """Flush every file and folder under `root`, and `root` itself, to the disk."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def clear_stale(target: Path) -> None:
    """Remove what killed processes left beside `target`; put back an old one set aside."""
    if not target.parent.is_dir():
        return
    pattern = re.compile(rf"\.{re.escape(target.name)}\.(tmp|old)-([1-9][0-9]*)-[0-9a-f]{{8}}")
    for path in sorted(target.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError), _locked(path) as lock:
            if lock is Lock.HELD:
                continue
            if lock is Lock.UNSUPPORTED and _is_another_process(int(match[2])):
                continue
            if match[1] == "old" and not target.exists():
                logger.warning("putting back %s, which an interrupted build had set aside", target)
                path.rename(target)
            else:
                logger.warning("removing %s, left by an interrupted build", path)
                _remove(path)


def exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(b))


def _take_place(staged: Path, target: Path) -> None:
    """Make `staged` the target and remove what was there before."""
    while True:
        try:
            os.rename(staged, target)  # no target yet, or an empty directory
            sync(target.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):  # another build has just set it aside
            handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            try:
                _lock(handle)  # until it is removed no other build takes it for a dead one's
                _replace(staged, target)
            finally:
                os.close(handle)
            return


def _replace(staged: Path, target: Path) -> None:
    old = staged
    if not exchange(staged, target):
        old = _beside(target, "old")
        os.rename(target, old)
        try:
            os.rename(staged, target)
        except BaseException:
            os.rename(old, target)
            raise
    sync(target.parent)
    _remove(old)


def _beside(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def _make_parents(folder: Path) -> list[Path]:
    """Create `folder` and its parents; those made here, innermost first."""
    made = []
    while not folder.exists():
        made.append(folder)
        folder = folder.parent
    for path in reversed(made):
        path.mkdir(exist_ok=True)
    return made


def sync(path: Path) -> None:
    """Flush one file or one folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a filesystem whose folders cannot be flushed
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Remove a directory tree if it is there; a failure is logged, since the result stands."""
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # another process removes it too: what is left, if anything
            continue
        except OSError as error:
            logger.warning("could not remove %s: %s", path, error)
            return


def _is_another_process(pid: int) -> bool:
    """Whether `pid` runs and is not this process, whose number a container gives again."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class Lock(Enum):
    """What came of an attempt to lock a directory."""

    OURS = "ours"
    HELD = "held"  # by whoever fills it
    UNSUPPORTED = "unsupported"  # the filesystem has no locks


def _lock(handle: int) -> Lock:
    """Try to lock an open directory; closing it gives the lock back."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError:
        return Lock.UNSUPPORTED
    return Lock.OURS


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Lock]:
    """Lock the directory for the block, or say why not; `FileNotFoundError` if it is gone."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = _lock(handle)
        if not os.path.samestat(os.stat(path), os.fstat(handle)):
            found = Lock.HELD  # another one took the name: its owner's
        yield found
    finally:
        os.close(handle)


def _make_locked(target: Path, stack: contextlib.ExitStack) -> Path:
    """A new directory beside `target`, locked until `stack` is left and then removed."""
    while True:
        staged = _beside(target, "tmp")
        with contextlib.ExitStack() as attempt, contextlib.suppress(FileNotFoundError):
            attempt.callback(_remove, staged)
            os.mkdir(staged)
            # Until it is locked another process takes it for a dead one's, and may remove it.
            if attempt.enter_context(_locked(staged)) is not Lock.HELD:
                stack.push(attempt.pop_all())
                return staged


@contextlib.contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack inside the block, where they would just kill."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, leave)
                replaced.append(number)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
