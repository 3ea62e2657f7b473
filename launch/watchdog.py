"""Sees that a rank failed, died or stalled, and gets this rank out even where its main thread is blocked.

Liveness: every rank beats once a second through the store. Rank 0 reads all beats and is the only judge of the others;
they judge rank 0, by its beat and by the store itself, which rank 0 serves. 15 s without a beat is death (120 s inside
`long_task`, which may hold the interpreter). So a beat costs each rank two small messages a second, whatever the size
of the world. Progress: `step_timeout_s` from one step, or one unit of a long task, to the next.

Two threads, because a call into the store may block for ever when rank 0 is stopped or its host is gone: the reporter
owns the connection, the watcher never touches it and judges the reporter's own silence too.

Leaving after a failure that was not voted (rules 17 to 19): the first record under the failure key is the one that is
shown. Rank 0 answers what is open and says so in the store; the others stay until then, so that no abort cuts it short.
Rank 0 stays until all others have read the record. Each stay has an end, then MPI_Abort, then a hard exit.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

from dist_infer.errors import ExitCode
from dist_infer.launch.failure import Alarm, FailureRecord, death, decode, encode, render

FAILURE_KEY = "launch/failure"
READ_KEY = "launch/failure/read"
ANSWERED_KEY = "launch/failure/answered"

BEAT_S = 1.0
LIVENESS_S = 15.0
LONG_TASK_LIVENESS_S = 120.0
GRACE_S = 2.0  # for the main thread to see the alarm and answer; for peers to read the record

_LOOK_S = 0.25
_LOOK_AFTER_FAILURE_S = 0.02
_STDERR = 2


class Store(Protocol):
    """What the watchdog needs of a TCPStore."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """All keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and read it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if the key holds `expected` ("": is absent); gives back what it holds then."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read keys that are there."""


class Watchdog:
    """The deadlines of one rank. `abort(code)` ends the whole job and may itself hang.

    `store` is a connection that nobody else uses, or None in a world of one, where only progress is watched.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        host: str,
        store: Store | None,
        alarm: Alarm,
        abort: Callable[[int], None],
        step_timeout_s: float = 300.0,
        liveness_s: float = LIVENESS_S,
        long_task_liveness_s: float = LONG_TASK_LIVENESS_S,
    ) -> None:
        self._rank, self._size, self._host = rank, size, host
        self._store = store
        self._alarm = alarm
        self._abort = abort
        self._step_timeout_s = step_timeout_s
        self._liveness_s = self._normal_liveness_s = liveness_s
        self._long_task_liveness_s = long_task_liveness_s
        self._where = "start-up"
        self._progress_at: float | None = None  # None: no progress is due
        self._stopped = threading.Event()
        self._leaving = threading.Lock()
        self._wake_reporter = threading.Event()
        self._report: FailureRecord | None = None
        self._last_round_at = self._last_look_at = time.monotonic()
        self._beats_sent = 0
        self._seen_beats: dict[int, tuple[bytes, float]] = {}
        self._lost = False  # the store is gone
        self._rank_0_answered = False  # set in the store by rank 0, seen by all
        self._answered_here = False
        self._num_read = 0
        self._threads: list[threading.Thread] = []

    # What the main thread says.

    def start(self) -> None:
        """Begin to beat and to watch."""
        loops = [self._watch_loop] if self._store is None else [self._watch_loop, self._report_loop]
        self._last_round_at = self._last_look_at = time.monotonic()
        for loop in loops:
            thread = threading.Thread(target=loop, name=loop.__name__.strip("_"), daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """The watch is off: nothing is a failure from now on."""
        self._alarm.over = True
        self._stopped.set()
        self._wake_reporter.set()
        for thread in self._threads:
            thread.join(_LOOK_S)

    def step(self, step: int) -> None:
        """A step begins; the next one is due within `step_timeout_s`."""
        self._where = f"step {step}"
        self._progress_at = time.monotonic()

    def progress(self, where: str) -> None:
        """A unit of a long task is done, for example a tensor is loaded; the next one is due."""
        self._where = where
        self._progress_at = time.monotonic()

    def rest(self, where: str) -> None:
        """No progress is due until the next step."""
        self._where = where
        self._progress_at = None

    @property
    def where(self) -> str:
        """What this rank is doing, for messages."""
        return self._where

    @contextlib.contextmanager
    def sleeping(self) -> Iterator[None]:
        """The pool sleeps: no progress is due, liveness still is."""
        was_due = self._progress_at is not None
        self._progress_at = None
        try:
            yield
        finally:
            self._progress_at = time.monotonic() if was_due else None

    @contextlib.contextmanager
    def long_task(self, name: str) -> Iterator[None]:
        """Load, compile or capture, which may hold the interpreter: 120 s without a beat are allowed."""
        before, was_due = self._where, self._progress_at is not None
        self._liveness_s = self._long_task_liveness_s
        self.progress(name)
        self._beat_now()
        try:
            yield
        finally:
            self._where = before
            self._progress_at = time.monotonic() if was_due else None
            self._liveness_s = self._normal_liveness_s

    def _beat_now(self) -> None:
        """Say the new liveness before anything can hold the interpreter; at most a second."""
        if self._store is None:
            return
        sent = self._beats_sent
        self._wake_reporter.set()
        until = time.monotonic() + BEAT_S
        while self._beats_sent < sent + 1 and time.monotonic() < until and self._alarm.record is None:
            time.sleep(1e-3)

    # Leaving after a failure.

    def leave(self, record: FailureRecord | None = None) -> NoReturn:
        """End this rank, and with it the job, without a collective. Never depends on anything that may fail.

        With `record` this rank is the one that failed: the record is put under the failure key and shown, unless
        another rank's is there already, which then is the cause. Without, what the alarm holds is the reason.
        """
        if not self._leaving.acquire(blocking=False):
            time.sleep(10 * GRACE_S)  # the other thread is leaving
        _exit_hard_after(4 * GRACE_S)
        code = int(ExitCode.ERROR)
        try:
            if record is not None:
                self._publish(record)
            code = int((self._alarm.record or {}).get("exit_code", code))
            self._stay_for_the_others()
            sys.stdout.flush()
        finally:
            _exit_hard_after(GRACE_S)
            try:
                self._abort(code)
            finally:
                os._exit(code)

    def _publish(self, record: FailureRecord) -> None:
        self._report = record
        self._wake_reporter.set()
        if self._store is not None:
            self._wait_for(lambda: self._alarm.record is not None, GRACE_S)
        first = self._alarm.record
        if first is None or first == record:
            self._alarm.record = record
            show(record)

    def _stay_for_the_others(self) -> None:
        if self._store is None or self._lost:
            return
        self._answered_here = True
        self._wake_reporter.set()
        if self._rank == 0:
            self._wait_for(lambda: self._num_read >= self._size, GRACE_S)
            time.sleep(5 * _LOOK_AFTER_FAILURE_S)  # they go first: a store that vanishes makes them noisy
        else:
            self._wait_for(lambda: self._rank_0_answered, 2 * GRACE_S)

    def _wait_for(self, ready: Callable[[], bool], limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not ready() and not self._lost and time.monotonic() < until:
            time.sleep(_LOOK_AFTER_FAILURE_S / 2)

    # The watcher: judges, never blocks.

    def _watch_loop(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            if self._alarm.over:
                continue
            if self._alarm.record is None:
                record = self._own_fault()
                if record is None:
                    continue
                self._stall(record)
            # the main thread sees the alarm in its next poll, answers what is open and leaves; a blocked one doesn't
            self._stopped.wait(GRACE_S)
            if not self._alarm.over:
                self.leave()

    def _own_fault(self) -> FailureRecord | None:
        now = time.monotonic()
        if now - self._last_look_at > 4 * _LOOK_S:  # it is this process that was held up: give the reporter a chance
            self._last_round_at = now
        self._last_look_at = now
        silent_s = now - self._last_round_at
        if self._store is not None and silent_s > self._liveness_s:
            text = f"the store that it serves gave no answer for {silent_s:.0f} s"
            return death(text, rank=0, where=self._where, stacks=True)
        at = self._progress_at
        if at is not None and now - at > self._step_timeout_s:
            text = f"no progress for {self._step_timeout_s:g} s (--step-timeout){self._silent_ranks(now)}"
            return death(text, rank=self._rank, host=self._host, where=self._where, pid=os.getpid(), stacks=True)
        return None

    def _silent_ranks(self, now: float) -> str:
        late = {rank: now - at for rank, (_, at) in self._seen_beats.items() if now - at > 3 * BEAT_S}
        return "".join(f"; no sign of life from rank {rank} for {silent_s:.0f} s" for rank, silent_s in late.items())

    def _stall(self, record: FailureRecord) -> None:
        dump_stacks(self._rank)
        if record["rank"] == self._rank:
            self._publish(record)
        else:
            self._lost = True
            self._alarm.record = record
            show(record)

    # The reporter: owns the store connection.

    def _report_loop(self) -> None:
        beat_at = 0.0
        while not self._stopped.is_set():
            try:
                if self._wake_reporter.is_set() or time.monotonic() >= beat_at:
                    self._wake_reporter.clear()
                    self._beat()
                    beat_at = time.monotonic() + BEAT_S
                self._exchange_failure()
            except Exception as error:  # a store error of any type: rank 0, which serves it, is gone
                self._lose_store(error)
                return
            self._last_round_at = time.monotonic()
            self._wake_reporter.wait(_LOOK_S if self._alarm.record is None else _LOOK_AFTER_FAILURE_S)

    def _beat(self) -> None:
        store = self._connection()
        store.set(_beat_key(self._rank), f"{self._beats_sent + 1}\t{self._liveness_s}\t{self._host}\t{self._where}")
        self._beats_sent += 1
        watched = range(1, self._size) if self._rank == 0 else range(1)
        present = [rank for rank in watched if rank in self._seen_beats or store.check([_beat_key(rank)])]
        beats = store.multi_get([_beat_key(rank) for rank in present]) if present else []
        now = time.monotonic()
        for rank, beat in zip(present, beats, strict=True):
            last, at = self._seen_beats.get(rank, (b"", now))
            if beat != last:
                self._seen_beats[rank] = (beat, now)
            elif self._report is None and self._alarm.record is None:
                self._report = _judge(rank, beat, now - at)

    def _exchange_failure(self) -> None:
        store = self._connection()
        if self._alarm.record is None and not self._alarm.over:
            if self._report is not None:
                held = store.compare_set(FAILURE_KEY, "", encode(self._report))
            elif store.check([FAILURE_KEY]):
                held = store.get(FAILURE_KEY)
            else:
                return
            self._note_failure(decode(held))
            store.add(READ_KEY, 1)
        if self._alarm.record is not None:
            if self._rank == 0:
                self._num_read = store.add(READ_KEY, 0)
                if self._answered_here and not self._rank_0_answered:
                    store.set(ANSWERED_KEY, "1")
                    self._rank_0_answered = True
            else:
                self._rank_0_answered = self._rank_0_answered or store.check([ANSWERED_KEY])

    def _note_failure(self, record: FailureRecord) -> None:
        mine = record == self._report and int(record["rank"]) != self._rank
        if record.get("stacks") and int(record["rank"]) != self._rank:
            dump_stacks(self._rank)  # before the main thread sees the alarm and moves
        self._alarm.record = record
        if mine:
            show(record)  # this rank found another one dead: nobody else will say it

    def _lose_store(self, error: Exception) -> None:
        if self._alarm.over or self._stopped.is_set():
            return
        self._lost = True
        if self._alarm.record is None:
            text = f"the connection to the store that it serves was lost ({type(error).__name__})"
            record = death(text, rank=0, where=self._where)
            self._alarm.record = record
            show(record)

    def _connection(self) -> Store:
        if self._store is None:
            raise RuntimeError("a world of one has no store")
        return self._store


def show(record: FailureRecord) -> None:
    """The message on standard error, in one write so that ranks don't mix."""
    with contextlib.suppress(OSError):
        os.write(_STDERR, render(record).encode(errors="backslashreplace"))


def dump_stacks(rank: int) -> None:
    """Where every thread of this rank stands."""
    with contextlib.suppress(OSError, ValueError):
        os.write(_STDERR, f"dist-infer: stacks of rank {rank}, pid {os.getpid()}\n".encode())
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)


def _judge(rank: int, beat: bytes, silent_s: float) -> FailureRecord | None:
    """The death of a rank whose last beat is too old by its own word."""
    _, liveness_s, host, where = beat.decode().split("\t", 3)
    if silent_s <= float(liveness_s):
        return None
    return death(f"no sign of life for {silent_s:.0f} s", rank=rank, host=host, where=where, stacks=True)


def _beat_key(rank: int) -> str:
    return f"launch/beat/{rank}"


def _exit_hard_after(limit_s: float) -> None:
    """Code 1 and the stacks, from a thread in C: it needs neither the interpreter's lock nor its goodwill."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
