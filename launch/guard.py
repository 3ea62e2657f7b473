"""A small process beside each rank: says that the rank died without a word, and ends it when a neighbour is gone.

While a rank is inside MPI_Init or MPI_Finalize it holds the interpreter, so no thread of it can look after anything,
and it would wait for ever for a rank that ended before MPI_Init, or that a SIGSTOP has reached. The watchdog sees such
a rank only once the world is open, and only after minutes while it loads. This process needs neither interpreter nor
store of the rank: it looks into /proc at the children of the launcher, which are the ranks of this host.

When its own rank ends without having said that it leaves, it names the rank: some launchers tell a pid at most.

It judges nothing it can't see: without a launcher that it knows as the rank's parent, without /proc, or while its own
rank is stopped too (the job is suspended), it stays quiet. The rank tells it by its standard input when it leaves, and
it ends with its rank. The file imports the standard library only: it runs as a script, in a Python without packages.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

Verdict = Literal["gone", "stopped"]

PATIENCE_S = 10.0  # launchers start ranks within milliseconds; a debugger or a suspended job takes longer, but is seen
SETTLE_S = 1.0  # for the launcher to end the job itself once the culprit is killed

_LOOK_S = 0.25
_LEAVING, _ENDS = b"L", b"E"
_FOR_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # sent to whole steps
_STDERR = 2
_LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted", "hydra_pmi_proxy", "slurmstepd")


class Guard:
    """The rank's handle on its guard; without one where there is nothing to look at."""

    def __init__(self, process: "subprocess.Popen[bytes] | None") -> None:
        self._process = process

    @classmethod
    def start(cls, *, rank: int, host: str, rank_variable: str, local_size: int | None) -> "Guard":
        """Begin to look after the ranks of this host, which have `rank_variable` in their environment."""
        launcher = os.getppid()
        if local_size is None or local_size < 2 or _name_of(launcher) not in _LAUNCHERS:
            return cls(None)
        arguments = [rank, host, os.getpid(), launcher, rank_variable, local_size]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
            )
        except OSError:
            return cls(None)  # no process to be had: the deadlines of the rank itself are still there
        return cls(process)

    def leaving(self) -> None:
        """From now on ranks may end one after another."""
        self._tell(_LEAVING)

    def ends(self) -> None:
        """Whatever there is to say about the end of this rank has been said."""
        self._tell(_ENDS)

    def stop(self) -> None:
        """End it."""
        self.ends()
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(SETTLE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _tell(self, word: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(word)
                self._process.stdin.flush()


class Neighbours:
    """The ranks of this host as /proc shows them, and since when something has been wrong with each."""

    def __init__(self, *, rank: int, local_size: int) -> None:
        self._rank = rank
        self._local_size = local_size
        self.leaving = False
        self.speaks = False  # for the ranks of this host
        self.pids: dict[int, int] = {}  # of all ranks that were ever seen
        self._since: dict[tuple[int | None, Verdict], float] = {}

    def look(self, states: Mapping[int, tuple[int, str]], now: float) -> tuple[int | None, Verdict] | None:
        """Who has been gone or stopped for too long, given pid and state of the ranks that are there.

        The rank is None where one of them has never been seen.
        """
        self.pids |= {rank: pid for rank, (pid, _) in states.items()}
        wrong: set[tuple[int | None, Verdict]] = set()
        if states.get(self._rank, (0, "T"))[1] != "T":
            wrong = {(rank, "stopped") for rank, (_, state) in states.items() if state == "T"}
            if not self.leaving and len(states) < self._local_size:
                gone: list[int | None] = [rank for rank in self.pids if rank not in states]
                wrong |= {(rank, "gone") for rank in gone or [None]}
        self.speaks = self._rank == min((rank for rank, (_, state) in states.items() if state != "T"), default=None)
        patience_s = PATIENCE_S if self.speaks else PATIENCE_S + 2 * SETTLE_S  # one speaks and acts before the others
        self._since = {key: self._since.get(key, now) for key in wrong}
        return next((key for key, since in self._since.items() if now - since > patience_s), None)

    def forget(self) -> None:
        """This process itself was held up: what it saw before says nothing."""
        self._since = {}


def find_states(launcher: int, rank_variable: str) -> dict[int, tuple[int, str]]:
    """Pid and state by rank, of the launcher's children that are alive and have the variable."""
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{launcher}/task"):
            for pid in Path(f"/proc/{launcher}/task/{task}/children").read_text().split():
                with contextlib.suppress(OSError, ValueError):
                    rank, state = _rank_of(int(pid), rank_variable), _state_of(int(pid))
                    if rank is not None and state not in "ZX":
                        found[rank] = int(pid), state
    return found


def watch(rank: int, host: str, pid: int, launcher: int, rank_variable: str, local_size: int) -> None:
    """The life of the guard: until its rank closes the pipe, or a verdict."""
    for number in _FOR_RANKS:
        signal.signal(number, signal.SIG_IGN)
    neighbours, has_said_why = Neighbours(rank=rank, local_size=local_size), False
    looked_at = time.monotonic()
    while os.getppid() == pid:
        if select.select([sys.stdin], [], [], _LOOK_S)[0]:
            word = os.read(sys.stdin.fileno(), 1)
            if not word:
                break
            neighbours.leaving = neighbours.leaving or word == _LEAVING
            has_said_why = has_said_why or word == _ENDS
        now = time.monotonic()
        if now - looked_at > 8 * _LOOK_S:
            neighbours.forget()
        looked_at = now
        states = find_states(launcher, rank_variable)
        verdict = neighbours.look(states, now) if rank in states else None
        if verdict is not None:
            _end_job(host, pid, *verdict, neighbours.pids, speaks=neighbours.speaks)
            return
    others = len(find_states(launcher, rank_variable).keys() - {rank})
    if not has_said_why and others == local_size - 1:  # else it was ended like the others
        _say(f"rank {rank} (host {host}, pid {pid})", "its process ended without a word: killed, crashed, or os._exit")


def _end_job(
    host: str, pid: int, culprit: int | None, verdict: Verdict, pids: Mapping[int, int], *, speaks: bool
) -> None:
    if speaks:
        name = f"a rank (host {host})" if culprit is None else f"rank {culprit} (host {host}, pid {pids[culprit]})"
        what = {
            "gone": f"is not there for {PATIENCE_S:.0f} s: it ended before the others, or never started",
            "stopped": f"has been stopped for {PATIENCE_S:.0f} s (SIGSTOP, or a debugger that left it so)",
        }[verdict]
        _say(name, f"{what}; the job ends")
    if culprit is not None and verdict == "stopped":
        with contextlib.suppress(OSError):
            os.kill(pids[culprit], signal.SIGKILL)
    if not select.select([sys.stdin], [], [], SETTLE_S)[0]:  # closed: the rank has ended
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _say(name: str, what: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"dist-infer: {name} failed: {what}\n".encode())


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def _rank_of(pid: int, rank_variable: str) -> int | None:
    start = f"{rank_variable}=".encode()
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(entry[len(start) :]) for entry in entries if entry.startswith(start)), None)


if __name__ == "__main__":
    _, own_rank, own_host, own_pid, parent, variable, size = sys.argv
    watch(int(own_rank), own_host, int(own_pid), int(parent), variable, int(size))
