"""The control plane of a world in one process: ranks in threads, messages in memory.

It keeps the contract of comm.agreement.ControlPlane, and checks that the i-th collective of every rank is the same. A
wait that nothing can end any more is a HangError, told apart from a slow one because every thread of the world is then
waiting.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from dist_infer.errors import PeerFailedError
from dist_infer.types import Int64Array


class VotedError(Exception):
    """The agreed error, equal on all ranks."""


class HangError(BaseException):
    """A wait without a way out. No engine may keep it for a vote."""


class BrokenError(BaseException):
    """A check of the world failed: collectives that differ, a token after the end, blocks that leak ..."""


class DiedError(BaseException):
    """The rank is gone without a word; its beat stops."""


class Hub:
    """What the ranks share.

    A change wakes all waits. When all live ranks wait and no change is under way, the next event of `when_idle`
    happens; without one the world hangs.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.version = 0
        self.live: set[int] = set()  # threads of ranks that have not left
        self.seen: dict[int, int] = {}  # thread -> version at which it last found nothing to do
        self.when_idle: deque[Callable[[], None]] = deque()
        self.hung = False
        self.news: list[bytes] = []
        self.records: dict[int, dict[int, Int64Array]] = defaultdict(dict)
        self.outputs: deque[tuple[int, int, bytes]] = deque()
        self.wakes: dict[int, int] = defaultdict(int)
        self.farewells: dict[int, int] = {}
        self.votes: dict[str, dict[int, str]] = defaultdict(dict)
        self.posted: list[list[object]] = [[] for _ in range(size)]
        self.failed = False  # a failure record stands in the store
        self.dead = False  # a beat is missing
        self.broken: BrokenError | None = None

    @contextmanager
    def change(self) -> Iterator[None]:
        """Hold the lock, then let every wait look again."""
        with self.changed:
            yield
            self.version += 1
            self.changed.notify_all()

    def wait(
        self, ready: Callable[[], bool], *, what: str, on_poll: Callable[[], None] | None = None, beats: bool = True
    ) -> None:
        me = threading.get_ident()
        while True:
            if on_poll is not None:
                on_poll()
            with self.changed:
                if ready():
                    return
                if self.broken is not None:
                    raise self.broken
                if self.failed or (self.dead and beats):
                    raise PeerFailedError("another rank has failed")
                if self.hung:
                    raise HangError(what)
                self.seen[me] = self.version
                if any(self.seen.get(thread) != self.version for thread in self.live):
                    self.changed.wait(0.05)
                    continue
                with self.change():  # nothing moves any more
                    if self.when_idle:
                        self.when_idle.popleft()()
                    else:
                        self.hung = True

    def post(self, rank: int, what: object) -> int:
        """The next collective of `rank`; returns how many all must have posted for it to end."""
        idx = len(self.posted[rank])
        with self.change():
            for other in range(self.size):
                if len(self.posted[other]) > idx and self.posted[other][idx] != what:
                    self.broken = BrokenError(
                        f"mismatched collective: rank {rank} {what}, rank {other} {self.posted[other][idx]}"
                    )
                    raise self.broken
            self.posted[rank].append(what)
        return idx + 1

    def all_posted(self, count: int) -> bool:
        return min(len(p) for p in self.posted) >= count


class MemoryControl:
    """ControlPlane in memory. `idle_checks_beats` False is a naive variant."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.num_news = 0
        self.num_records = 0
        self.idle_checks_beats = True

    def broadcast_news(self, data: bytes) -> None:
        with self.hub.change():
            self.hub.news.append(data)

    def receive_news(self, on_poll: Callable[[], None], *, idle: bool) -> bytes:
        beats = self.idle_checks_beats or not idle
        self.hub.wait(
            lambda: len(self.hub.news) > self.num_news, what=f"rank {self.rank}: news", on_poll=on_poll, beats=beats
        )
        self.num_news += 1
        return self.hub.news[self.num_news - 1]

    def post_record(self, record: Int64Array) -> None:
        with self.hub.change():
            self.num_records += 1
            self.hub.records[self.num_records][self.rank] = record

    def wait_table(self) -> Int64Array:
        round_ = self.hub.records[self.num_records]
        self.hub.wait(lambda: len(round_) == self.size, what=f"rank {self.rank}: table {self.num_records}")
        return np.stack([round_[rank] for rank in range(self.size)])

    def send_outputs(self, step: int, data: bytes) -> None:
        with self.hub.change():
            self.hub.outputs.append((self.rank, step, data))

    def take_outputs(self) -> list[tuple[int, int, bytes]]:
        with self.hub.changed:
            taken = list(self.hub.outputs)
            self.hub.outputs.clear()
            return taken

    def wake_root(self) -> None:
        with self.hub.change():
            self.hub.wakes[self.rank] += 1

    def woken(self) -> bool:
        return any(self.hub.wakes.values())

    def take_wake(self, rank: int) -> None:
        self.hub.wait(lambda: self.hub.wakes[rank] > 0, what=f"wake-up of rank {rank}")
        with self.hub.change():
            self.hub.wakes[rank] -= 1

    def wait(self, ready: Callable[[], bool], *, idle: bool) -> None:
        beats = self.idle_checks_beats or not idle
        self.hub.wait(ready, what=f"rank {self.rank}: wait, idle {idle}", beats=beats)

    def farewell(self, code: int) -> list[int]:
        with self.hub.change():
            self.hub.farewells[self.rank] = code
        self.hub.wait(lambda: len(self.hub.farewells) == self.size, what=f"rank {self.rank}: farewell")
        return [self.hub.farewells[rank] for rank in range(self.size)]

    def vote(self, stage: str, error: BaseException | None) -> None:
        with self.hub.change():
            self.hub.votes[stage][self.rank] = "" if error is None else str(error)
        votes = self.hub.votes[stage]
        self.hub.wait(lambda: len(votes) == self.size, what=f"rank {self.rank}: vote")
        if any(votes.values()):
            raise VotedError("; ".join(f"rank {rank}: {votes[rank]}" for rank in sorted(votes) if votes[rank]))
