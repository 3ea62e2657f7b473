"""The guard: whom it judges and when, and in real processes that it ends a rank whose neighbour is gone or stopped."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dist_infer.launch.guard import PATIENCE_S, Guard, Neighbours, find_states

RUNNING = {0: (10, "R"), 1: (11, "S")}
LATE = PATIENCE_S + 3


def looks(*states: dict[int, tuple[int, str]], rank: int = 0, leaving: bool = False) -> object:
    """The verdict after the last of several looks, each later than the patience."""
    neighbours = Neighbours(rank=rank, local_size=2)
    neighbours.leaving = leaving
    return [neighbours.look(each, idx * LATE) for idx, each in enumerate(states)][-1]


def test_all_there_and_running_is_fine() -> None:
    assert looks(RUNNING, RUNNING, RUNNING) is None


def test_patience_comes_first() -> None:
    neighbours = Neighbours(rank=0, local_size=2)
    alone = {0: (10, "R")}
    assert [neighbours.look(alone, at) for at in (0.0, PATIENCE_S - 1, PATIENCE_S + 1)] == [None, None, (None, "gone")]
    neighbours = Neighbours(rank=0, local_size=2)
    assert [neighbours.look(each, LATE * idx) for idx, each in enumerate([alone, RUNNING, alone])] == [None] * 3


def test_the_first_rank_speaks_and_acts_before_the_others() -> None:
    stopped = {0: (10, "S"), 1: (11, "S"), 2: (12, "T")}
    first, second = Neighbours(rank=0, local_size=3), Neighbours(rank=1, local_size=3)
    for neighbours in (first, second):
        neighbours.look(stopped, 0.0)
    assert first.look(stopped, PATIENCE_S + 1) == (2, "stopped") and first.speaks
    assert second.look(stopped, PATIENCE_S + 1) is None and not second.speaks
    assert second.look(stopped, LATE) == (2, "stopped")


def test_who_is_gone_is_known_if_it_was_ever_seen() -> None:
    assert looks(RUNNING, {0: (10, "R")}, {0: (10, "R")}) == (1, "gone")
    assert looks(RUNNING, {1: (11, "R")}, {1: (11, "R")}, rank=1) == (0, "gone")


def test_a_stopped_rank_is_judged_by_those_that_are_not() -> None:
    stopped = {0: (10, "S"), 1: (11, "T")}
    assert looks(stopped, stopped) == (1, "stopped")
    assert looks(stopped, stopped, rank=1) is None  # its own rank is the one
    suspended = {0: (10, "T"), 1: (11, "T")}
    assert looks(suspended, suspended) is None
    assert looks({0: (10, "S"), 1: (11, "t")}, {0: (10, "S"), 1: (11, "t")}) is None  # in a debugger


def test_ranks_that_leave_may_be_gone_but_not_stopped() -> None:
    alone = {0: (10, "R")}
    assert looks(RUNNING, alone, alone, leaving=True) is None
    stopped = {0: (10, "S"), 1: (11, "T")}
    assert looks(stopped, stopped, leaving=True) == (1, "stopped")


def test_what_was_seen_before_a_hold_up_is_forgotten() -> None:
    neighbours = Neighbours(rank=0, local_size=2)
    neighbours.look({0: (10, "R")}, 0.0)
    neighbours.forget()
    assert neighbours.look({0: (10, "R")}, LATE) is None


def test_where_nothing_can_be_seen_there_is_no_guard() -> None:
    for handle in (
        Guard.start(rank=0, host="h", rank_variable="X", local_size=1),
        Guard.start(rank=0, host="h", rank_variable="X", local_size=None),
        Guard.start(rank=0, host="h", rank_variable="X", local_size=2),  # the parent is no launcher
    ):
        handle.leaving()
        handle.stop()


LAUNCHER = """
import os, subprocess, sys, time
ranks = []
for rank in range(2):
    code = sys.argv[1] if rank == 0 else "import time; time.sleep(1000)"
    ranks.append(subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TEST_RANK": str(rank)}))
print(*[rank.pid for rank in ranks], flush=True)
codes = [rank.wait() for rank in ranks[:1]]
sys.exit(0 if codes == [0] else 1)
"""
RANK = """
import time
from dist_infer.launch import guard
guard._LAUNCHERS = (guard._name_of(guard.os.getppid()),)
handle = guard.Guard.start(rank=0, host="h", rank_variable="TEST_RANK", local_size=2)
time.sleep(1.5)  # for it to see both
print("watched", flush=True)
{then}
"""


class Launched:
    """A launcher with two ranks, of which rank 0 has a guard."""

    def __init__(self, then: str, patience_s: float) -> None:
        script = RANK.format(then=then)
        if patience_s != PATIENCE_S:  # the guard runs from the file, so a copy of the file is less patient
            script = script.replace("handle =", f"guard.__file__ = impatient({patience_s})\nhandle =")
            script = IMPATIENT + script
        argv = [sys.executable, "-c", LAUNCHER, script]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.pids = [int(pid) for pid in self.process.stdout.readline().split()]

    def wait_until_watched(self) -> None:
        """The guard has had the time to look."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "watched\n"

    def end(self) -> tuple[int, str]:
        """Code and standard error of the launcher."""
        try:
            _, text = self.process.communicate(timeout=60)
        finally:
            self.kill()
        return self.process.returncode, text

    def kill(self) -> None:
        """End whatever is left."""
        for pid in (self.process.pid, *self.pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


IMPATIENT = """
import tempfile
from pathlib import Path
def impatient(limit_s):
    text = Path(guard.__file__).read_text()
    file = tempfile.NamedTemporaryFile("w", suffix=".py", delete=False)
    file.write(text.replace("PATIENCE_S = 10.0", f"PATIENCE_S = {limit_s}"))
    file.close()
    return file.name
"""


@pytest.fixture
def waiting() -> Iterator[Launched]:
    launched = Launched("time.sleep(1000)", 1.0)
    launched.wait_until_watched()
    yield launched
    launched.kill()


def test_a_rank_that_is_gone_ends_the_others(waiting: Launched) -> None:
    os.kill(waiting.pids[1], signal.SIGKILL)
    code, text = waiting.end()
    assert code == 1
    assert f"dist-infer: rank 1 (host h, pid {waiting.pids[1]}) failed: is not there" in text


def test_a_rank_that_is_stopped_is_killed_and_ends_the_others(waiting: Launched) -> None:
    os.kill(waiting.pids[1], signal.SIGSTOP)
    code, text = waiting.end()
    assert code == 1
    assert f"rank 1 (host h, pid {waiting.pids[1]}) failed: has been stopped for" in text


def test_after_leaving_others_may_go() -> None:
    launched = Launched("handle.leaving(); time.sleep(4); handle.stop()", 1.0)
    launched.wait_until_watched()
    os.kill(launched.pids[1], signal.SIGKILL)
    assert launched.end() == (0, "")


def test_the_guard_ends_with_its_rank_and_ignores_what_ranks_get(tmp_path: Path) -> None:
    launched = Launched("print(handle._process.pid, flush=True); time.sleep(1000)", PATIENCE_S)
    launched.wait_until_watched()
    assert launched.process.stdout is not None
    pid = int(launched.process.stdout.readline())
    watch = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
        assert Path(f"/proc/{pid}").exists()
        os.kill(launched.pids[0], signal.SIGKILL)
        assert select.select([watch], [], [], 20.0)[0]
    finally:
        os.close(watch)
        launched.kill()


def test_states_of_a_launchers_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"TEST_RANK": "7"})
    try:
        until = time.monotonic() + 30
        while not find_states(os.getpid(), "TEST_RANK") and time.monotonic() < until:
            time.sleep(0.05)
        assert find_states(os.getpid(), "TEST_RANK")[7][0] == child.pid
        assert find_states(os.getpid(), "OTHER") == {}
    finally:
        child.kill()
        child.communicate()
