"""Signals of a rank: the first one asks for a drain, the second one ends the process at once.

SIGUSR1 reaches the ranks through all launchers, SIGTERM and SIGINT where the launcher leaves time for it. A handler
says what came and sets a flag; every wait of a rank polls in Python, so the handler runs within a millisecond or so.

Open MPI's mpirun drops what its ranks print once it has got a signal itself. So that the job does not vanish without a
word, rank 0 says it on mpirun's own standard error too, where that is on this host.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from types import FrameType

from dist_infer.errors import ExitCode
from dist_infer.launch.failure import Alarm

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

_STDERR = 2
_OPEN_MPI_LAUNCHERS = ("prterun", "mpirun", "orterun", "mpiexec")
_PR_SET_PDEATHSIG = 1
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here: a forked child must not load anything


class StopSignals:
    """Turns SIGUSR1, SIGTERM and SIGINT into a flag; `close` gives the old handlers back.

    The second signal leaves at once with code 1: no cleanup, because cleanup may be what hangs. So does the first one
    as long as nobody has asked `stop_requested`: then nobody would drain either (start-up, an idle pool); SIGUSR1
    gives code 75 there. `on_exit` is called before, in the handler.
    """

    def __init__(
        self,
        name: str,
        alarm: Alarm,
        *,
        speaks_for_all: bool = False,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._alarm = alarm
        self._speaks_for_all = speaks_for_all
        self._on_exit = on_exit
        self._stop = False
        self._heeded = False
        self._old: dict[signal.Signals, object] = {}

    def stop_requested(self) -> bool:
        """True once a signal has asked this rank to stop. Who asks must also stop."""
        self._heeded = True
        return self._stop

    def nobody_asks(self) -> None:
        """Whoever asked has ended: the next signal leaves at once again."""
        self._heeded = False

    def install(self) -> None:
        """Take the handlers over. Only the main thread of a process can."""
        for number in STOP_SIGNALS:
            self._old[number] = signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Restore the handlers that were there before `install`.

        Except for SIGUSR1, which would kill by default: asking a job that is done to drain is no reason to die.
        """
        while self._old:
            number, handler = self._old.popitem()
            if number == signal.SIGUSR1 and handler == signal.SIG_DFL:
                handler = signal.SIG_IGN
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        drains = self._heeded and not self._stop
        what = "drains" if drains else "leaves at once"
        why = " (the second signal)" if self._stop else ""
        self._say(f"dist-infer: {self._name} got {signal.Signals(number).name} and {what}{why}\n".encode())
        if not drains:
            self._on_exit()
            # before the first step a drain has nothing to finish, and all of the job is still to do
            gives_back = number == signal.SIGUSR1 and not self._heeded and self._alarm.record is None
            os._exit(ExitCode.DRAINED if gives_back else ExitCode.ERROR)
        self._stop = True

    def _say(self, line: bytes) -> None:
        if self._alarm.record is not None:
            return  # the cause has been told; this is the launcher, ending what is left
        with contextlib.suppress(OSError):
            os.write(_STDERR, line)
        if self._speaks_for_all:
            with contextlib.suppress(OSError):
                _write_to_launcher(line)


def _write_to_launcher(line: bytes) -> None:
    """To the standard error of the parent, if that is Open MPI's launcher; never waits."""
    parent = os.getppid()
    with open(f"/proc/{parent}/comm") as file:
        if not file.read().startswith(_OPEN_MPI_LAUNCHERS):
            return
    fd = os.open(f"/proc/{parent}/fd/{_STDERR}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def leave_when_drained() -> None:
    """From now until `StopSignals` takes over, SIGUSR1 ends this process with code 75: nothing has begun yet.

    By default it would kill, and a batch script could not tell that the job may go on.
    """
    signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(ExitCode.DRAINED))


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `number` when the parent ends, so that no orphan keeps a GPU.

    Where the parent has ended already, the process leaves at once. Linux only: elsewhere it does nothing.
    """
    parent = os.getppid()
    if _PRCTL is None:
        return
    _PRCTL(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(ExitCode.ERROR)
