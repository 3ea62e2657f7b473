"""Stop signals, in processes of their own: they end processes."""

import os
import signal
import subprocess
import sys

import pytest

from dist_infer.launch.failure import Alarm
from dist_infer.launch.signals import STOP_SIGNALS, StopSignals

PROGRAM = """
import os, signal, sys, time
from dist_infer.launch.failure import Alarm, death
from dist_infer.launch.signals import StopSignals
alarm = Alarm()
signals = StopSignals("rank 5 (host h)", alarm)
signals.install()
steps = sys.argv[1].split()
for step in steps:
    if step == "ask":
        print(signals.stop_requested(), flush=True)
    elif step == "nobody":
        signals.nobody_asks()
    elif step == "close":
        signals.close()
    elif step == "failure":
        alarm.record = death("gone", rank=1)
    else:
        os.kill(os.getpid(), getattr(signal, step))
        time.sleep(0.01)
print("end", flush=True)
"""


def run(steps: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, steps], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", [number.name for number in STOP_SIGNALS])
def test_the_first_signal_asks_to_stop_the_second_leaves(name: str) -> None:
    first = run(f"ask {name} ask")
    assert (first.returncode, first.stdout.split()) == (0, ["False", "True", "end"])
    assert f"rank 5 (host h) got {name} and drains" in first.stderr
    second = run(f"ask {name} ask SIGTERM ask")
    assert (second.returncode, second.stdout.split()) == (1, ["False", "True"])
    assert "got SIGTERM and leaves at once (the second signal)" in second.stderr


@pytest.mark.parametrize(
    ("steps", "code"),
    [("SIGTERM", 1), ("ask nobody SIGTERM", 1), ("SIGUSR1", 75), ("ask nobody SIGUSR1", 75), ("failure SIGUSR1", 1)],
)
def test_where_nobody_would_drain_the_first_signal_leaves(steps: str, code: int) -> None:
    done = run(steps)
    assert done.returncode == code and "end" not in done.stdout
    told = "" if "failure" in steps else f"rank 5 (host h) got {steps.split()[-1]} and leaves at once\n"
    assert done.stderr == f"dist-infer: {told}" if told else not done.stderr


def test_after_a_failure_the_signal_is_no_news() -> None:
    done = run("failure SIGTERM")
    assert (done.returncode, done.stderr) == (1, "")


def test_before_anything_has_begun_a_drain_is_code_75() -> None:
    code = "import os; from dist_infer.launch.signals import leave_when_drained; leave_when_drained()"
    code += "; os.kill(os.getpid(), 10); print('end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (75, b"")


def test_close_gives_the_old_handlers_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals = StopSignals("test", Alarm())
    signals.install()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    signals.close()
    signals.close()
    assert [signal.getsignal(number) for number in STOP_SIGNALS[1:]] == before[1:]


def test_a_drain_that_comes_too_late_does_not_kill() -> None:
    done = run("ask close SIGUSR1")
    assert (done.returncode, done.stdout.split()) == (0, ["False", "end"])
    assert run("ask close SIGTERM").returncode == -signal.SIGTERM


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import time
from dist_infer.launch.signals import die_with_parent
die_with_parent()
print("bound", flush=True)
time.sleep(1000)
'''], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watch = os.pidfd_open(child)
        try:
            parent.kill()
            parent.wait()
            assert _ends(watch, 10.0)
        finally:
            os.close(watch)


def _ends(pidfd: int, limit_s: float) -> bool:
    import select

    return bool(select.select([pidfd], [], [], limit_s)[0])
