"""A cache folder that only its user can read or write, and a lock between processes that never blocks in C."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_infer.errors import UsageError

_POLL_S = 0.05


def open_private_folder(path: Path) -> Path:
    """Creates the folder with mode 0700 if it is absent, and returns its absolute path.

    Errors: UsageError when it can't be created, belongs to somebody else or is open to others: what is loaded from it
        must be our own.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise UsageError(
            f"cache folder {path} can't be created: {error.strerror}; set DIST_INFER_CACHE to a folder of yours"
        ) from error
    if found.st_uid != os.geteuid():
        raise UsageError(
            f"cache folder {path} belongs to user {found.st_uid}; set DIST_INFER_CACHE to a folder of yours"
        )
    if found.st_mode & 0o077:
        raise UsageError(f"cache folder {path} is open to other users; close it first: chmod 700 {path}")
    return path.resolve()


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file; `on_wait` is called at every turn while another process holds it.

    A process that dies gives its lock back.

    Errors: UsageError when the file system has no locks.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(fd, path):
            on_wait()
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EINTR):
            return False
        raise UsageError(
            f"{path}: no locks on this file system ({error.strerror}); set DIST_INFER_CACHE to a local folder"
        ) from error
    return True
