"""A lock between processes: whoever holds it is alone, and it ends with the process, kill -9 too.

`file_lock` is the lock, `waiting_lock` one that says so when it has to wait. It belongs to the open
file and not to its content or existence, so the empty file stays behind and never has to be cleaned
up.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # Windows
try:
    import msvcrt
except ImportError:
    msvcrt = None  # everywhere else

# What the file systems say that have no locks, as some network mounts.
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has none


@contextmanager
def file_lock(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock of `path`, a file that is made where it is missing (its directory is not).

    wait: until it is free. Else BlockingIOError where another process, or another `file_lock` of
    this one, holds it. OSError where the file cannot be made, or is a link, which could lead
    anywhere. Where the file system has no locks, nothing is locked.
    """
    # Not inherited by programs and spawned workers, which could outlive us and keep the lock.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
    try:
        while not _taken_now(descriptor):
            if not wait:
                raise BlockingIOError(f"{path} is locked by another process")
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)  # which ends the lock


def _taken_now(descriptor: int) -> bool:
    """Take the lock if it is free; whether we have it."""
    try:
        if fcntl:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt:
            # The first byte, which need not exist. mypy reads msvcrt as Linux has it: empty.
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError as error:
        if error.errno in NO_LOCKS_HERE:
            return True
        if error.errno in (errno.EAGAIN, errno.EACCES):  # EACCES: Windows
            return False
        raise
    return True


@contextmanager
def waiting_lock(path: Path, doing: str) -> Iterator[None]:
    """Hold the lock of `path`; while another process has it, wait, and say what that is doing."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, wait=False))
        except BlockingIOError:
            print(f"another process is {doing}; waiting for it", file=sys.stderr, flush=True)
            stack.enter_context(file_lock(path, wait=True))
        yield
