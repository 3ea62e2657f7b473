"""The rank pool: rank 0 runs a program that calls functions on every rank; the others sleep between the calls.

`pool.run(fn, 3)` pickles fn and its arguments once, broadcasts the bytes, and gives back the values of fn(world, 3) by
rank, or raises one RemoteError with a text record per failed rank. What can't be pickled is refused on rank 0 before
anything is sent, so no rank waits for a task that never comes. Rank 0 runs the task from the same bytes as the others.

After a failure the pool goes on if every rank came back from the task. One that does not come back is likely to wait
for the failed rank in a collective: after `settle_s` the failed rank ends the job with its record.

Trust: pickles cross MPI between the ranks of one job only.
"""

import pickle
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import cloudpickle

from dist_infer.errors import PeerFailedError, UsageError
from dist_infer.launch.channel import Broadcaster, Mailbox
from dist_infer.launch.failure import FailureRecord, RemoteError, decode, describe, encode
from dist_infer.launch.world import World

SETTLE_S = 10.0

_TASK, _SETTLED, _STOP = b"T", b"S", b"E"
_VALUE, _FAILURE = b"V", b"F"
_NUMBER_BYTES = 8
_WAITING = "the pool, waiting for a task"

T = TypeVar("T")
P = ParamSpec("P")


class Pool:
    """Rank 0's handle on all ranks, itself included. Not thread-safe."""

    def __init__(self, world: World, settle_s: float) -> None:
        self._world = world
        self._settle_s = settle_s
        self._number = 0
        self._closed = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    def run(self, fn: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call fn(world, *args, **kwargs) on every rank, with that rank's world; the values by rank.

        Errors: UsageError if the task can't be pickled: nothing was sent. RemoteError if it failed on some ranks.
        """
        if self._closed:
            raise UsageError("the rank pool is closed")
        task = _dump_task(fn, args, kwargs)
        self._number += 1
        if self._world.task_channel is None:
            replies = {0: _call(self._world, self._number, task)}
        else:
            replies = self._run_everywhere(task, *self._world.task_channel)
        results = [_load_reply(self._world, rank, replies[rank]) for rank in range(self.size)]
        failures = [failure for _, failure in results if failure is not None]
        if failures:
            raise RemoteError(failures)
        return [value for value, _ in results]

    def _run_everywhere(self, task: bytes, tasks: Broadcaster, mail: Mailbox) -> dict[int, bytes]:
        tasks.send(_TASK + self._number.to_bytes(_NUMBER_BYTES, "little") + task)
        tasks.flush()  # nothing moves it while this rank is in the task
        replies = {0: _call(self._world, self._number, task)}
        settling = _Settling(self._settle_s + 2.0)  # the failed rank itself goes first

        def all_replied() -> bool:
            replies.update((source, data) for source, _, data in mail.take())
            if settling.is_over(*replies.values()):
                self._world.fail(RemoteError([decode(reply[1:]) for reply in replies.values() if _failed(reply)]))
            return len(replies) == self.size

        self._world.control.wait(all_replied, idle=True)
        if any(map(_failed, replies.values())):
            tasks.send(_SETTLED)
        return replies

    def close(self) -> None:
        """Send the other ranks home."""
        if not self._closed:
            self._closed = True
            if self._world.task_channel is not None:
                tasks, _ = self._world.task_channel
                tasks.send(_STOP)
                tasks.flush()


class _Settling:
    """The time that ranks have to come back from a task, counted from its first failure."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._failed_at: float | None = None

    def is_over(self, *replies: bytes) -> bool:
        if self._failed_at is None and any(map(_failed, replies)):
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > self._limit_s


def run_pool(world: World, main: Callable[[Pool], T], *, settle_s: float = SETTLE_S) -> T | None:
    """Rank 0 runs main(pool) and gives back its value; the others serve tasks until it is over, and give back None.

    Ranks: collective over the world.
    """
    world.watchdog.rest(_WAITING)
    if world.task_channel is not None and world.rank != 0:
        _serve(world, *world.task_channel, settle_s)
        return None
    pool = Pool(world, settle_s)
    try:
        value = main(pool)
    except PeerFailedError:
        raise  # nobody listens any more
    except BaseException:
        pool.close()
        raise
    pool.close()
    return value


def _serve(world: World, tasks: Broadcaster, mail: Mailbox, settle_s: float) -> None:
    """The other ranks' loop: asleep between tasks."""
    reply, settling = b"", _Settling(settle_s)

    def look() -> None:
        mail.sent()
        if settling.is_over(reply):
            world.watchdog.leave(decode(reply[1:]))

    while True:
        with world.watchdog.sleeping():
            message = tasks.receive(idle=True, on_poll=look)
        kind, rest = message[:1], memoryview(message)[1:]
        reply, settling = b"", _Settling(settle_s)
        if kind == _STOP:
            world.control.wait(mail.sent, idle=False)
            return
        if kind == _TASK:
            number = int.from_bytes(rest[:_NUMBER_BYTES], "little")
            reply = _call(world, number, rest[_NUMBER_BYTES:])
            mail.send(0, number, reply)


def _call(world: World, number: int, task: bytes | memoryview) -> bytes:
    """Run a task; its value or its failure as a reply. SystemExit and the like go up: they end the job."""
    world.watchdog.rest(f"task {number}")
    try:
        fn, args, kwargs = pickle.loads(task)
        value: bytes = cloudpickle.dumps(fn(world, *args, **kwargs))
        reply = _VALUE + value
    except PeerFailedError:
        raise
    except Exception as error:
        record = describe(error, rank=world.rank, host=world.host, where=world.watchdog.where)
        reply = _FAILURE + encode(record).encode()
    world.watchdog.rest(_WAITING)
    world.signals.nobody_asks()
    return reply


def _failed(reply: bytes) -> bool:
    return reply[:1] == _FAILURE


def _load_reply(world: World, rank: int, reply: bytes) -> tuple[Any, FailureRecord | None]:
    if _failed(reply):
        return None, decode(reply[1:])
    try:
        return pickle.loads(memoryview(reply)[1:]), None
    except Exception as error:
        return None, describe(
            error, rank=rank, host=world.host, where="the result of a task, which rank 0 can't unpickle"
        )


def _dump_task(fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Pickle on the side that can still say no."""
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        cloudpickle.dumps(fn)
    except Exception as error:
        raise UsageError(f"the function {name} can't be sent to the ranks: {error}; {_cure(error)}") from error
    try:
        return bytes(cloudpickle.dumps((fn, args, kwargs)))
    except Exception as error:
        raise UsageError(
            f"the arguments of {name} can't be sent to the ranks: {error}; pass plain data, and open files, locks, "
            "sockets and groups on the rank itself"
        ) from error


def _cure(error: Exception) -> str:
    if "_Ops" in str(error) or "_Classes" in str(error):
        return (
            "cloudpickle takes functions of __main__ and of tests by value, with torch.ops or torch.classes among "
            "their globals, which don't pickle: import torch inside the function, or put the function into a module "
            "that every rank can import"
        )
    return "use only globals and closures that pickle, or put the function into a module that every rank can import"
