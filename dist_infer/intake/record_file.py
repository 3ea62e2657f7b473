"""The output file of a batch: whole lines only, on the disk within seconds, and never half a record left behind.

Each record is one write. A thread brings them to the disk each 5 s, so that a slow disk doesn't stop the steps. A write
that fails is cut off again, and nothing is written after it: what the file holds then is what a resumed run builds on.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from dist_infer.errors import DistInferError
from dist_infer.intake.output_lock import OutputLock
from dist_infer.intake.records import Outcome, encode_record

SYNC_INTERVAL_S = 5.0

Write = Callable[[int, memoryview], int]


class RecordFile:
    """Records of one job in a regular file. Nothing is created or changed before `begin`."""

    def __init__(
        self,
        path: Path,
        *,
        lock: OutputLock,
        write: Write = os.write,
        fsync: Callable[[int], None] | None = None,
        sync_interval_s: float = SYNC_INTERVAL_S,
    ) -> None:
        self._path = path
        self._lock = lock
        self._write = write
        self._fsync = fsync or os.fsync
        self._sync_interval_s = sync_interval_s
        self._fd = -1
        self._num_bytes = 0
        self._num_records = 0
        self._failed: DistInferError | None = None
        self._sync: _PeriodicSync | None = None

    def begin(self, *, keep_bytes: int | None = None, num_kept: int = 0, overwrite: bool = False) -> None:
        """Open the file: a new one, an emptied one, or its first `keep_bytes`, which hold `num_kept` records."""
        mode = 0 if keep_bytes is not None else os.O_CREAT | (os.O_TRUNC if overwrite else os.O_EXCL)
        try:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | mode, 0o666)
            if keep_bytes is not None:
                os.ftruncate(self._fd, keep_bytes)
            self._fsync(self._fd)
            sync_folder(self._path.parent)
        except OSError as error:
            raise DistInferError(f"can't write {self._path}: {error.strerror}") from error
        self._num_bytes, self._num_records = keep_bytes or 0, num_kept
        self._sync = _PeriodicSync(self._fd, self._fsync, self._sync_interval_s)

    def write(self, outcome: Outcome, *, model: str) -> None:
        """Write one record; it is with the operating system when this returns, and on the disk within seconds.

        Errors: DistInferError, at once and at every later call, when a record can't be written or kept.
        """
        if self._sync is None:
            raise ValueError("write before begin or after close")
        if self._failed is not None:
            raise self._failed
        if self._sync.error is not None:
            raise self._fail(self._sync.error)
        data = encode_record(outcome, model=model)
        try:
            self._write_all(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._num_bytes)
            raise self._fail(error) from error
        self._num_bytes += len(data)
        self._num_records += 1
        self._sync.needed()

    def close(self) -> None:
        """Bring the file to the disk, close it and give its lock back. A second call does nothing.

        Errors: DistInferError when the disk does not take it.
        """
        try:
            if self._sync is not None:
                self._close_file(self._sync)
        finally:
            self._lock.release()

    def _close_file(self, sync: "_PeriodicSync") -> None:
        self._sync = None
        sync.stop()
        try:
            self._fsync(self._fd)
        except OSError as error:
            raise self._fail(error) from error
        finally:
            os.close(self._fd)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._write(self._fd, view) :]

    def _fail(self, error: OSError) -> DistInferError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cause = "no space is left for it" if full else str(error.strerror)
        fix = "make room" if full else "cure that"
        self._failed = DistInferError(
            f"can't write {self._path}: {cause}. Its {self._num_records} records are safe; "
            f"{fix}, then run the same command with --resume"
        )
        return self._failed


class _PeriodicSync:
    """A thread that brings what was written to the disk."""

    def __init__(self, fd: int, fsync: Callable[[int], None], interval_s: float) -> None:
        self._fd = fd
        self._fsync = fsync
        self._interval_s = interval_s
        self._dirty = False
        self._stop = threading.Event()
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="sync of the output", daemon=True)
        self._thread.start()

    def needed(self) -> None:
        """Something was written."""
        self._dirty = True

    def stop(self) -> None:
        """End the thread; it is not at the disk any more when this returns."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if not self._dirty:
                continue
            self._dirty = False
            try:
                self._fsync(self._fd)
            except OSError as error:  # told at the next record
                self.error = error
                return


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk; file systems that know no such thing are left alone."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes) -> None:
    """The file holds all of `data` or what it held before, whatever happens in between.

    Errors: OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    partial.replace(path)
    sync_folder(path.parent)
