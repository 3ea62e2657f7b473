"""One piece of memory that all ranks of a host map, or one reason on all of them why there is none.

Rank 0 makes a file in /dev/shm and reserves its bytes, so that a full or tiny /dev/shm (containers often have 64 MB) is
an error here and not a SIGBUS in the middle of a step. The name goes through the store. Each rank says there whether it
has mapped the file, and all read what all have said: they agree, whatever happened to one of them.

The name lives for these few milliseconds only; then the memory has no name and ends with the last process that maps it,
however that ends. Every rank removes the name, so it stays behind only if all are killed within that time.
"""

import contextlib
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from dist_infer.errors import DistInferError

FOLDER = Path("/dev/shm")
PREFIX = "dist-infer-"
ORDERED_STORES = ("x86_64", "AMD64")  # machines on which ShmWire's memory order holds

_FILE_KEY = "shm/file"


class NoSharedMemoryError(DistInferError):
    """The ranks can't share memory. Raised on all of them with the same text."""


def open_segment(
    *, store: Store, rank: int, size: int, num_bytes: int, timeout_s: float, folder: Path = FOLDER
) -> mmap.mmap:
    """`num_bytes` of zeros that all ranks map.

    Ranks: collective over the ranks of `store`, which nobody else uses.
    Errors: NoSharedMemoryError on all ranks; DistInferError where a rank does not come in time.
    """
    path = None
    if rank == 0:
        path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        if path is not None:
            reason, segment = _tried(_create, path, num_bytes)
            store.set(_FILE_KEY, f"{reason}\n{path}")
        else:
            _wait(store, [_FILE_KEY], rank, timeout_s)
            reason, name = store.get(_FILE_KEY).decode().rsplit("\n", 1)
            path = Path(name)
            segment = None
            if not reason:
                reason, segment = _tried(_attach, path, num_bytes)
        store.set(_answer_key(rank), reason)
        answers = [_answer_key(other) for other in range(size)]
        _wait(store, answers, rank, timeout_s)
        refusals = [answer.decode() for answer in store.multi_get(answers) if answer]
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
    if refusals or segment is None:
        raise NoSharedMemoryError(refusals[0])
    return segment


def _tried(make: Callable[[Path, int], mmap.mmap], path: Path, num_bytes: int) -> tuple[str, mmap.mmap | None]:
    """The memory, or in one line the reason why there is none."""
    try:
        return "", make(path, num_bytes)
    except NoSharedMemoryError as error:
        return " ".join(str(error).split()), None


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    machine = platform.machine()
    if machine not in ORDERED_STORES:
        raise NoSharedMemoryError(f"a {machine} may reorder stores, only {' and '.join(ORDERED_STORES)} do not")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
            return mmap.mmap(handle, num_bytes)
        finally:
            os.close(handle)
    except OSError as error:
        raise NoSharedMemoryError(f"{path.parent} gives no {num_bytes / 1e6:.3g} MB ({error.strerror})") from error


def _attach(path: Path, num_bytes: int) -> mmap.mmap:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(handle, num_bytes)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter than that
        raise NoSharedMemoryError(f"a rank can't map rank 0's file in {path.parent}: {error}") from error


def _wait(store: Store, keys: list[str], rank: int, timeout_s: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DistInferError(
            f"rank {rank} did not meet all ranks of this host to share memory in {timeout_s:g} s: {error}"
        ) from error


def _answer_key(rank: int) -> str:
    return f"shm/answer/{rank}"
