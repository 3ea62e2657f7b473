"""One writer for an output: the file OUT.lock names who writes it, and is locked as long as that process lives.

A lock that a dead process of this host left behind is taken over, and so is one of an earlier life of this job, which
the batch system has ended before it restarted the job, maybe on another host. What else another host holds can't be
looked at from here, so it is refused with the fix. On a file system without file locks only the names count.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from dist_infer.errors import UsageError

RESTART = " restart "  # in a job id, before how often the batch system has restarted the job

_HELD = (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lock. `started` tells a process from a later one with the same pid."""

    host: str
    pid: int
    started: str
    job_id: str | None

    @classmethod
    def this_process(cls, job_id: str | None) -> Self:
        """`job_id` is the batch system's."""
        return cls(host=socket.gethostname(), pid=os.getpid(), started=_start_of(os.getpid()), job_id=job_id)

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """None where the file says nothing: its maker died between making and writing it."""
        try:
            fields = json.loads(data)
            return cls(**{name: fields[name] for name in ("host", "pid", "started", "job_id")})
        except (ValueError, KeyError, TypeError):
            return None

    def may_live(self) -> bool:
        """It can't be proven dead: it lives, or it is on another host."""
        return self.host != socket.gethostname() or _start_of(self.pid) == self.started != ""

    def is_earlier_life_of(self, job_id: str | None) -> bool:
        """It belongs to the same job before a restart."""
        (then, _, before), (now, _, restarts) = ((text or "").partition(RESTART) for text in (self.job_id, job_id))
        return then == now != "" and int(before or 0) < int(restarts or 0)

    def __str__(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on host {self.host}{job}"


class OutputLock:
    """The lock of one output, held from `take` to `release`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def take(cls, output: Path, *, job_id: str | None = None) -> Self:
        """Become the one writer of `output`.

        Errors: UsageError naming the holder, and the fix where it may be gone.
        """
        path = output.with_name(output.name + ".lock")
        while True:
            fd = _open(path)
            try:
                if not _is_at(path, fd):
                    os.close(fd)
                    continue  # its holder has just removed it
                _claim(path, fd, output, job_id)
                _write_holder(fd, Holder.this_process(job_id))
                return cls(path, fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                raise

    def release(self) -> None:
        """Remove the lock. A second call does nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(f"can't make the lock file {path}: {error.strerror}") from error


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _claim(path: Path, fd: int, output: Path, job_id: str | None) -> None:
    holder = Holder.parse(os.pread(fd, 4096, 0))
    if not _try_lock(fd):
        raise UsageError(f"{output} is being written by {holder or 'another process'}; wait for it, or stop it")
    if not _is_at(path, fd):  # removed between our look and our lock: the next one would not see us
        raise UsageError(f"{output} was being written until now; start again")
    if holder is None or not holder.may_live() or holder.is_earlier_life_of(job_id):
        return
    here = socket.gethostname()
    fix = "wait for it, or stop it" if holder.host == here else f"if that job is over, run: rm {path}"
    raise UsageError(f"{output} is being written by {holder}, as {path.name} says; {fix}")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD  # any other error: this file system has no locks
    return True


def _write_holder(fd: int, holder: Holder) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(asdict(holder)).encode() + b"\n", 0)
    os.fsync(fd)


def _start_of(pid: int) -> str:
    """When a process of this host started, in the kernel's ticks; empty where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
