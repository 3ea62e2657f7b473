"""The deadlines, with a store in memory and limits of tenths of a second. Leaving is tested in test_failure.py."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dist_infer.launch import watchdog as module
from dist_infer.launch.failure import Alarm, FailureRecord, death, decode, encode
from dist_infer.launch.watchdog import FAILURE_KEY, READ_KEY, Watchdog


class MemoryStore:
    """As much of a TCPStore as the watchdog uses; can be cut off or made to hang."""

    def __init__(self) -> None:
        self.data: dict[str, str] = {}
        self.cut = False
        self.hang = threading.Event()
        self.hang.set()

    def _reach(self) -> None:
        self.hang.wait()
        if self.cut:
            raise ConnectionError("cut")

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.data[key] = value

    def get(self, key: str) -> bytes:
        self._reach()
        return self.data[key].encode()

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.data for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._reach()
        self.data[key] = str(int(self.data.get(key, "0")) + amount)
        return int(self.data[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._reach()
        if self.data.get(key, "") == expected:
            self.data[key] = desired
        return self.data[key].encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]


class LeftError(Exception):
    """What leaving is in here."""


class Ranks:
    """Watchdogs over one store; a rank that would leave is noted instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore()
        self.alarms: dict[int, Alarm] = {}
        self.made: list[Watchdog] = []
        self.left: list[int] = []
        self.shown: list[str] = []
        self.stacks: list[int] = []
        monkeypatch.setattr(module, "show", lambda record: self.shown.append(str(record["text"])))
        monkeypatch.setattr(module, "dump_stacks", self.stacks.append)
        monkeypatch.setattr(module, "GRACE_S", 0.2)
        monkeypatch.setattr(module, "BEAT_S", 0.05)
        monkeypatch.setattr(module, "_LOOK_S", 0.02)
        self.monkeypatch = monkeypatch

    def start(
        self, rank: int, *, size: int = 2, store: MemoryStore | None = None, step_timeout_s: float = 60.0
    ) -> Watchdog:
        self.alarms[rank] = Alarm()
        dog = Watchdog(
            rank=rank,
            size=size,
            host=f"host{rank}",
            store=None if size == 1 else store or self.store,
            alarm=self.alarms[rank],
            abort=lambda code: None,
            step_timeout_s=step_timeout_s,
            liveness_s=0.6,
            long_task_liveness_s=60.0,
        )
        self.monkeypatch.setattr(dog, "leave", lambda record=None: self.left.append(rank))
        self.made.append(dog)
        dog.start()
        return dog

    def record(self, rank: int) -> FailureRecord:
        """What this rank's alarm holds."""
        found = self.alarms[rank].record
        assert found is not None
        return found

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait as long as it takes, within reason."""
        for _ in range(1000):
            if ready():
                return
            time.sleep(0.01)
        pytest.fail("it does not come")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(monkeypatch)
    yield made
    made.store.hang.set()
    for dog in made.made:
        dog.stop()


def test_ranks_that_beat_live(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.start(rank, size=3)
    time.sleep(1.5)  # more than twice the limit
    assert [alarm.record for alarm in ranks.alarms.values()] == [None] * 3


def test_a_rank_without_a_beat_is_dead_to_all(ranks: Ranks) -> None:
    dogs = [ranks.start(rank, size=3) for rank in range(3)]
    ranks.until(lambda: all(f"launch/beat/{rank}" in ranks.store.data for rank in range(3)))
    dogs[2].stop()
    ranks.until(lambda: all(ranks.alarms[rank].record for rank in (0, 1)))
    for rank in (0, 1):
        record = ranks.record(rank)
        assert (record["rank"], record["host"], record["where"], record["exit_code"]) == (2, "host2", "start-up", 1)
        assert "no sign of life" in str(record["text"])
    ranks.until(lambda: bool(ranks.shown))
    assert len(ranks.shown) == 1  # only the judge speaks
    assert sorted(ranks.stacks) == [0, 1]


def test_rank_0_is_judged_by_the_others(ranks: Ranks) -> None:
    dogs = [ranks.start(rank) for rank in range(2)]
    ranks.until(lambda: len(ranks.store.data) >= 2)
    time.sleep(0.1)
    dogs[0].stop()
    ranks.until(lambda: ranks.alarms[1].record is not None)
    assert ranks.record(1)["rank"] == 0


def test_a_long_task_may_be_silent_for_longer(ranks: Ranks) -> None:
    ranks.start(0)
    dog = ranks.start(1)
    ranks.until(lambda: "launch/beat/1" in ranks.store.data)
    with dog.long_task("load"):
        assert (
            ranks.store.data["launch/beat/1"].split("\t")[1] == "60.0"
        )  # said before anything can hold the interpreter
        ranks.monkeypatch.setattr(dog, "_beat", lambda: None)
        time.sleep(1.0)
        assert ranks.alarms[0].record is None


def test_loss_of_the_store_is_loss_of_rank_0(ranks: Ranks) -> None:
    ranks.start(1)
    ranks.store.cut = True
    ranks.until(lambda: bool(ranks.shown))
    assert ranks.record(1)["rank"] == 0
    assert "ConnectionError" in ranks.shown[0]
    ranks.until(lambda: ranks.left == [1])


def test_a_store_that_gives_no_answer_is_loss_of_rank_0(ranks: Ranks) -> None:
    ranks.start(1)
    time.sleep(0.1)
    ranks.store.hang.clear()
    ranks.until(lambda: bool(ranks.shown))
    assert "gave no answer" in ranks.shown[0]


def test_a_failure_record_reaches_all_and_is_counted_as_read(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.start(rank)
    ranks.store.data[FAILURE_KEY] = encode(death("broken", rank=5))
    ranks.until(lambda: all(alarm.record for alarm in ranks.alarms.values()))
    ranks.until(lambda: ranks.store.data.get(READ_KEY) == "2")
    assert ranks.shown == []  # rank 5 has said it itself
    ranks.until(lambda: sorted(ranks.left) == [0, 1])  # no main thread left by itself


def test_the_first_failure_is_the_one(ranks: Ranks) -> None:
    dogs = [ranks.start(rank) for rank in range(2)]
    ranks.store.data[FAILURE_KEY] = encode(death("the cause", rank=1))
    dogs[0]._publish(death("a consequence", rank=0))
    assert decode(ranks.store.data[FAILURE_KEY])["text"] == "the cause"
    assert ranks.shown == []
    assert ranks.record(0)["text"] == "the cause"


@pytest.mark.parametrize("size", [1, 2])
def test_no_progress_is_a_failure_of_this_rank(ranks: Ranks, size: int) -> None:
    dog = ranks.start(0, size=size, step_timeout_s=0.3)
    time.sleep(0.5)
    assert ranks.alarms[0].record is None  # nothing is due before the first step
    dog.step(7)
    ranks.until(lambda: ranks.alarms[0].record is not None)
    ranks.until(lambda: bool(ranks.shown))
    assert (ranks.record(0)["rank"], ranks.record(0)["where"]) == (0, "step 7")
    assert "no progress for 0.3 s (--step-timeout)" in ranks.shown[0]
    assert ranks.stacks == [0]


def test_progress_is_not_due_while_the_pool_sleeps_or_rests(ranks: Ranks) -> None:
    dog = ranks.start(0, size=1, step_timeout_s=0.3)
    dog.step(1)
    with dog.sleeping():
        time.sleep(0.5)
    dog.rest("a task")
    time.sleep(0.5)
    assert ranks.alarms[0].record is None
    dog.step(2)
    with dog.sleeping():
        time.sleep(0.1)
    ranks.until(lambda: ranks.alarms[0].record is not None)  # due again after the sleep


def test_units_of_a_long_task_are_progress(ranks: Ranks) -> None:
    dog = ranks.start(0, size=1, step_timeout_s=0.4)
    with dog.long_task("load"):
        for unit in range(4):
            time.sleep(0.2)
            dog.progress(f"tensor {unit}")
        assert ranks.alarms[0].record is None
        ranks.until(lambda: ranks.alarms[0].record is not None)
    assert ranks.record(0)["where"] == "tensor 3"


def test_after_the_farewell_nothing_is_a_failure(ranks: Ranks) -> None:
    dogs = [ranks.start(rank, step_timeout_s=0.2) for rank in range(2)]
    dogs[1].step(1)
    ranks.alarms[1].over = True
    dogs[0].stop()
    ranks.store.cut = True
    time.sleep(1.0)
    assert ranks.alarms[1].record is None
    assert ranks.left == []
