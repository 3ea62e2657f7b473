"""The control plane over MPI: small messages between ranks in which no wait blocks in C.

Every wait tests its request in Python, so that signals and the alarm are seen within milliseconds: a rank that sits
in a blocking MPI call sees neither, and burns a core. A wait that expects its message soon first yields, then sleeps
50 us at a time; an idle one sleeps up to 2 ms (0.02 core).

News and records have a communicator each, so that collectives of two kinds never meet; outputs and wake-ups share one
and differ in tag. A broadcast sends a header of fixed size with a short payload in it, so that the usual news costs one
collective and no rank has to know its length beforehand. The farewell counts outputs and wake-ups, so that none is
left for Finalize to trip over.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_infer.launch.failure import Alarm
from dist_infer.types import Int64Array

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER_BYTES = 2048
CHUNK_BYTES = 64 << 20  # far below the 2 GiB that an MPI count can say

_LENGTH_BYTES = 8
_INLINE_BYTES = HEADER_BYTES - _LENGTH_BYTES
_OUTPUT_TAG = 1
_WAKE_TAG = 2
_YIELDS = 100
_BUSY_SLEEP_S = 50e-6
_FIRST_SLEEP_S = 10e-6
_IDLE_SLEEP_S = 2e-3


def poll(ready: Callable[[], bool], alarm: Alarm, *, idle: bool, on_poll: Callable[[], None] | None = None) -> None:
    """Wait for `ready`; what has come counts even after an alarm.

    Errors: PeerFailedError once the alarm is set.
    """
    yields = 0 if idle else _YIELDS
    longest_s = _IDLE_SLEEP_S if idle else _BUSY_SLEEP_S
    sleep_s = _FIRST_SLEEP_S
    while not ready():
        if alarm.record is not None and not alarm.over:
            alarm.ring()
        if on_poll is not None:
            on_poll()
        if yields:
            yields -= 1
            os.sched_yield()
        else:
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, longest_s)


class Broadcaster:
    """Bytes of any length from rank 0 to all others, in order, over a communicator of its own."""

    def __init__(self, comm: "MPI.Comm", alarm: Alarm) -> None:
        self._comm = comm
        self._alarm = alarm
        self._header = np.zeros(HEADER_BYTES, np.uint8)
        self._length = self._header[:_LENGTH_BYTES].view(np.int64)
        self._pending: deque[tuple[MPI.Request, Any]] = deque()

    def send(self, data: bytes) -> None:
        """Rank 0: start the broadcast; waits only for the one before it."""
        self.flush()
        self._length[0] = len(data)
        if len(data) <= _INLINE_BYTES:
            self._header[_LENGTH_BYTES : _LENGTH_BYTES + len(data)] = np.frombuffer(data, np.uint8)
        self._start(self._header)
        if len(data) > _INLINE_BYTES:
            for chunk in _chunks(np.frombuffer(data, np.uint8)):
                self._start(chunk)

    def receive(self, *, idle: bool, on_poll: Callable[[], None] | None = None) -> bytes:
        """Other ranks: wait for the next broadcast. May be called again after an error: the receive stays posted."""
        if not self._pending:
            self._start(self._header)
        self.flush(idle=idle, on_poll=on_poll)
        length = int(self._length[0])
        if length <= _INLINE_BYTES:
            return self._header[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
        data = np.empty(length, np.uint8)
        for chunk in _chunks(data):
            self._start(chunk)
        self.flush()
        return data.tobytes()

    def flush(self, *, idle: bool = False, on_poll: Callable[[], None] | None = None) -> None:
        """Wait until nothing is under way."""
        while self._pending:
            poll(self._pending[0][0].Test, self._alarm, idle=idle, on_poll=on_poll)
            self._pending.popleft()

    def _start(self, buffer: Any) -> None:
        self._pending.append((self._comm.Ibcast(buffer, root=0), buffer))


class Mailbox:
    """Numbered messages of any length to one rank, in order a source; nothing in here waits."""

    def __init__(self, comm: "MPI.Comm", tag: int) -> None:
        from mpi4py import MPI  # loaded by World.open by now; a world of one never comes here

        self._comm = comm
        self._tag = tag
        self._status = MPI.Status()
        self._sending: deque[tuple[MPI.Request, Any]] = deque()
        self._arriving: dict[int, deque[tuple[MPI.Request, Any]]] = {}
        self._parts: dict[int, list[Any]] = {}
        self.num_sent = 0

    def send(self, dest: int, number: int, data: bytes) -> None:
        """Start sending; `sent` tells when all has gone."""
        self.num_sent += 1
        first = np.empty(16 + min(len(data), CHUNK_BYTES), np.uint8)
        first[:16].view(np.int64)[:] = (number, len(data))
        whole = np.frombuffer(data, np.uint8)
        first[16:] = whole[:CHUNK_BYTES]
        for part in (first, *_chunks(whole[CHUNK_BYTES:])):
            self._sending.append((self._comm.Isend(part, dest=dest, tag=self._tag), part))
        self.sent()

    def sent(self) -> bool:
        """Everything has left this rank."""
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()
        return not self._sending

    def take(self) -> list[tuple[int, int, bytes]]:
        """What has arrived in full: (source rank, number, data)."""
        while self._comm.Iprobe(tag=self._tag, status=self._status):
            source = self._status.Get_source()
            part = np.empty(self._status.Get_count(), np.uint8)
            request = self._comm.Irecv(part, source=source, tag=self._tag)
            self._arriving.setdefault(source, deque()).append((request, part))
        taken = []
        for source, parts in self._arriving.items():
            while parts and parts[0][0].Test():
                self._parts.setdefault(source, []).append(parts.popleft()[1])
                message = self._assemble(source)
                if message is not None:
                    taken.append(message)
        return taken

    def _assemble(self, source: int) -> tuple[int, int, bytes] | None:
        parts = self._parts[source]
        number, length = parts[0][:16].view(np.int64).tolist()
        if sum(len(part) for part in parts) - 16 < length:
            return None
        del self._parts[source]
        return source, number, b"".join([parts[0][16:].tobytes(), *(part.tobytes() for part in parts[1:])])


class MpiControl:
    """The ControlPlane of a world of several ranks. Only the main thread of a rank may use it."""

    def __init__(self, comm: "MPI.Intracomm", alarm: Alarm) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._alarm = alarm
        self._news = Broadcaster(comm.Dup(), alarm)
        self._records = comm.Dup()
        self._messages = comm.Dup()
        self._outputs = Mailbox(self._messages, _OUTPUT_TAG)
        self._own_outputs: list[tuple[int, int, bytes]] = []
        self._wakes: list[MPI.Request] = []
        self._wakes_sent = 0
        self._wake_receives: dict[int, MPI.Request] = {}
        self._wakes_taken = [0] * self.size
        self._outputs_taken = [0] * self.size
        self._record: Int64Array = np.zeros(0, np.int64)
        self._table: Int64Array = np.zeros((self.size, 0), np.int64)
        self._gather: MPI.Request | None = None

    # News.

    def broadcast_news(self, data: bytes) -> None:
        """Rank 0: send the news of a step."""
        self._news.send(data)

    def receive_news(self, on_poll: Callable[[], None], *, idle: bool) -> bytes:
        """Other ranks: wait for the news."""
        return self._news.receive(idle=idle, on_poll=on_poll)

    # Records.

    def post_record(self, record: Int64Array) -> None:
        """Start the all-gather. Shapes: record [fields]. Errors: RuntimeError when the last table was not taken."""
        if self._gather is not None:
            raise RuntimeError("a record was posted before the table of the last one was taken")
        if len(record) != len(self._record):
            self._record = np.zeros(len(record), np.int64)
            self._table = np.zeros((self.size, len(record)), np.int64)
        self._record[:] = record
        self._gather = self._records.Iallgather(self._record, self._table)

    def wait_table(self) -> Int64Array:
        """Wait for the records of all ranks. Shapes: [size, fields]."""
        if self._gather is None:
            raise RuntimeError("the table was asked for before a record was posted")
        poll(self._gather.Test, self._alarm, idle=False)
        self._gather = None
        return self._table.copy()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes on every rank. Ranks: collective over the world, never between a record and its table."""
        self.post_record(np.array([len(data)], np.int64))
        lengths = self.wait_table()[:, 0].tolist()
        own = np.zeros(max(lengths), np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        everything = np.zeros((self.size, max(lengths)), np.uint8)
        request = self._records.Iallgather(own, everything)
        poll(request.Test, self._alarm, idle=False)
        return [everything[rank, :length].tobytes() for rank, length in enumerate(lengths)]

    # Outputs and wake-ups.

    def send_outputs(self, step: int, data: bytes) -> None:
        """Send rank 0 the outputs of a step."""
        if self.rank == 0:
            self._own_outputs.append((0, step, data))
        else:
            self._outputs.send(0, step, data)

    def take_outputs(self) -> list[tuple[int, int, bytes]]:
        """Rank 0: what has arrived, as (source rank, step, data)."""
        taken = self._own_outputs + self._outputs.take()
        self._own_outputs = []
        for source, _, _ in taken:
            self._outputs_taken[source] += 1
        return taken

    def wake_root(self) -> None:
        """Send rank 0 one empty wake-up."""
        self._wakes.append(self._messages.Isend(b"", dest=0, tag=_WAKE_TAG))
        self._wakes_sent += 1

    def woken(self) -> bool:
        """Rank 0: a wake-up is there."""
        return bool(self._messages.Iprobe(tag=_WAKE_TAG))

    def take_wake(self, rank: int) -> None:
        """Rank 0: take exactly one wake-up of `rank`, which has sent it or is about to."""
        if rank not in self._wake_receives:  # else one that an alarm has interrupted
            self._wake_receives[rank] = self._messages.Irecv(bytearray(0), source=rank, tag=_WAKE_TAG)
        poll(self._wake_receives[rank].Test, self._alarm, idle=False)
        del self._wake_receives[rank]
        self._wakes_taken[rank] += 1

    # Waiting and leaving.

    def wait(self, ready: Callable[[], bool], *, idle: bool) -> None:
        """Poll `ready` until it is true."""
        poll(ready, self._alarm, idle=idle)

    def farewell(self, code: int) -> list[int]:
        """The last all-gather: exit codes by rank. Afterwards no request is active and no message under way."""
        outputs_sent = self._outputs.num_sent
        self.post_record(np.array([code, outputs_sent, self._wakes_sent], np.int64))
        table = self.wait_table()
        self._alarm.over = True
        if self.rank == 0:
            self._take_what_is_left(table)
        self._news.flush()
        self.wait(self._all_gone, idle=False)
        return [int(each) for each in table[:, 0]]

    def _take_what_is_left(self, table: Int64Array) -> None:
        sent = table[:, 1].tolist()
        for rank, wakes_sent in enumerate(table[:, 2].tolist()):
            while self._wakes_taken[rank] < wakes_sent:
                self.take_wake(rank)
        self.wait(lambda: self._taken_up_to(sent), idle=False)

    def _taken_up_to(self, sent: list[int]) -> bool:
        self.take_outputs()
        return all(taken >= due for taken, due in zip(self._outputs_taken[1:], sent[1:], strict=True))

    def _all_gone(self) -> bool:
        self._wakes = [request for request in self._wakes if not request.Test()]
        return self._outputs.sent() and not self._wakes


class LocalControl:
    """The ControlPlane of a world of one: no MPI."""

    rank = 0
    size = 1

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._record: Int64Array | None = None
        self._outputs: list[tuple[int, int, bytes]] = []
        self._wakes = 0

    def broadcast_news(self, data: bytes) -> None:
        """Nobody else needs the news."""

    def receive_news(self, on_poll: Callable[[], None], *, idle: bool) -> bytes:
        """Errors: RuntimeError, because rank 0 makes the news."""
        raise RuntimeError("rank 0 makes the news and receives none")

    def post_record(self, record: Int64Array) -> None:
        """Keep the record until `wait_table`."""
        if self._record is not None:
            raise RuntimeError("a record was posted before the table of the last one was taken")
        self._record = record.copy()

    def wait_table(self) -> Int64Array:
        """Shapes: [1, fields]."""
        if self._record is None:
            raise RuntimeError("the table was asked for before a record was posted")
        table, self._record = self._record[None], None
        return table

    def gather(self, data: bytes) -> list[bytes]:
        """The own bytes."""
        return [data]

    def send_outputs(self, step: int, data: bytes) -> None:
        """Keep the outputs for `take_outputs`."""
        self._outputs.append((0, step, data))

    def take_outputs(self) -> list[tuple[int, int, bytes]]:
        """What was sent since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    def wake_root(self) -> None:
        """Count a wake-up."""
        self._wakes += 1

    def woken(self) -> bool:
        """A wake-up was sent and not taken."""
        return self._wakes > 0

    def take_wake(self, rank: int) -> None:
        """Errors: RuntimeError where there is none."""
        if rank != 0 or not self._wakes:
            raise RuntimeError(f"rank {rank} has sent no wake-up")
        self._wakes -= 1

    def wait(self, ready: Callable[[], bool], *, idle: bool) -> None:
        """Poll `ready` until it is true."""
        poll(ready, self._alarm, idle=idle)

    def farewell(self, code: int) -> list[int]:
        """The own code."""
        self._alarm.over = True
        return [code]


def _chunks(data: Any) -> list[Any]:
    return [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
