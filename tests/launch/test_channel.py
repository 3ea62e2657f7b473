"""The control plane: what goes in on one rank comes out on the others, in order, at 1, 2 and 4 ranks."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from dist_infer.comm.agreement import ControlPlane
from dist_infer.errors import PeerFailedError
from dist_infer.launch import channel
from dist_infer.launch.channel import HEADER_BYTES, LocalControl, MpiControl, poll
from dist_infer.launch.failure import Alarm, death
from dist_infer.launch.world import World

REPEATS = 6
SIZES = (0, 1, 63, HEADER_BYTES - 9, HEADER_BYTES - 8, HEADER_BYTES - 7, 100_000)


def nothing() -> None:
    return None


def payload(length: int, salt: int) -> bytes:
    return np.random.default_rng([length, salt]).bytes(length)


def share_news(control: ControlPlane, data: bytes, *, idle: bool = False) -> bytes:
    if control.rank != 0:
        return control.receive_news(nothing, idle=idle)
    control.broadcast_news(data)
    return data


def step(control: ControlPlane, number: int) -> None:
    """What the ranks say to each other in one step."""
    assert share_news(control, payload(number % 50, number)) == payload(number % 50, number)
    control.post_record(np.array([number, control.rank], np.int64))
    table = control.wait_table()
    assert table.tolist() == [[number, rank] for rank in range(control.size)]


@pytest.mark.ranks(1, 2, 4)
def test_news_of_any_length_arrive_in_order(world: World) -> None:
    for repeat in range(REPEATS):
        for length in SIZES:
            sent = payload(length, repeat)
            assert share_news(world.control, sent, idle=bool(repeat % 2)) == sent


@pytest.mark.ranks(1, 2, 4)
def test_news_longer_than_a_chunk_arrive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CHUNK_BYTES", 10_000)
    for length in (9_999, 10_000, 10_001, 123_456):
        assert share_news(world.control, payload(length, 1)) == payload(length, 1)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("late_rank", [0, -1])
def test_a_late_rank_breaks_nothing(world: World, late_rank: int) -> None:
    for number in range(REPEATS):
        if world.rank == late_rank % world.size:
            time.sleep(0.05 * (number % 2))
        step(world.control, number)


@pytest.mark.ranks(1, 2, 4)
def test_table_is_a_copy(world: World) -> None:
    world.control.post_record(np.array([7], np.int64))
    first = world.control.wait_table()
    world.control.post_record(np.array([8], np.int64))
    world.control.wait_table()
    assert (first == 7).all()


@pytest.mark.ranks(1, 2, 4)
def test_records_may_change_their_length(world: World) -> None:
    for length in (1, 11, 0, 3):
        world.control.post_record(np.full(length, world.rank, np.int64))
        assert world.control.wait_table().tolist() == [[rank] * length for rank in range(world.size)]


@pytest.mark.ranks(1, 2)
def test_record_and_table_take_turns(world: World) -> None:
    with pytest.raises(RuntimeError, match="before a record"):
        world.control.wait_table()
    world.control.post_record(np.array([1], np.int64))
    with pytest.raises(RuntimeError, match="before the table"):
        world.control.post_record(np.array([1], np.int64))
    world.control.wait_table()


@pytest.mark.ranks(1, 2, 4)
def test_gather_gives_every_rank_the_bytes_of_all(world: World) -> None:
    for repeat in range(REPEATS):
        sent = [payload(rank * 1000 * repeat, rank) for rank in range(world.size)]
        assert world.control.gather(sent[world.rank]) == sent


@pytest.mark.ranks(1, 2, 4)
def test_outputs_arrive_once_and_in_order_a_source(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CHUNK_BYTES", 3_000)
    numbers = range(5 * REPEATS)
    lengths = [(0, 1, 2_999, 3_000, 9_001)[number % 5] for number in numbers]
    for number in numbers:
        world.control.send_outputs(number, payload(lengths[number], world.rank))
    taken: list[tuple[int, int, bytes]] = []
    if world.rank == 0:

        def take() -> bool:
            taken.extend(world.control.take_outputs())
            return len(taken) == world.size * len(numbers)

        world.control.wait(take, idle=False)
    for source in range(world.size if world.rank == 0 else 0):
        got = [(number, data) for rank, number, data in taken if rank == source]
        assert got == [(number, payload(lengths[number], source)) for number in numbers]
    step(world.control, 1)
    assert world.control.take_outputs() == [] if world.rank == 0 else True


@pytest.mark.ranks(1, 2, 4)
def test_wake_ups_are_taken_one_by_one(world: World) -> None:
    control, sender = world.control, world.size - 1
    for number in range(REPEATS):
        if world.rank == 0 and world.size > 1:
            assert not control.woken()
        step(control, number)
        if world.rank == sender:
            control.wake_root()
            control.wake_root()
        if world.rank == 0:
            control.wait(control.woken, idle=True)
            control.take_wake(sender)
            control.wait(control.woken, idle=True)
            control.take_wake(sender)
            assert not control.woken()
        step(control, number)


@pytest.mark.ranks(2, 4)
def test_the_receive_of_news_survives_an_error_of_the_poll(world: World) -> None:
    def broken() -> None:
        raise KeyError("poll")

    if world.rank == 0:
        time.sleep(0.05)
        world.control.broadcast_news(b"late")
    else:
        with pytest.raises(KeyError):
            world.control.receive_news(broken, idle=True)
        assert world.control.receive_news(nothing, idle=True) == b"late"
    step(world.control, 1)


@pytest.mark.ranks(2)
def test_every_wait_ends_with_the_alarm_and_can_be_taken_up_again(world: World) -> None:
    assert world._comm is not None
    alarm = Alarm()
    control = MpiControl(world._comm, alarm)
    record = np.array([5], np.int64)
    waits: list[Callable[[], object]] = [lambda: control.wait(lambda: False, idle=True)]
    if world.rank == 0:
        control.post_record(record)
        waits += [control.wait_table, lambda: control.take_wake(1)]
    else:
        waits += [lambda: control.receive_news(nothing, idle=True), lambda: control.receive_news(nothing, idle=False)]
    for wait in waits:
        ringer = threading.Timer(0.02, setattr, (alarm, "record", death("by design", rank=7)))
        ringer.start()
        with pytest.raises(PeerFailedError, match="rank 7 failed: by design"):
            wait()
        ringer.join()
        alarm.record = None
    step(world.control, 1)  # both ranks have been interrupted everywhere, nothing was there to be had
    if world.rank == 1:
        control.post_record(record)
        control.wake_root()
    else:
        control.take_wake(1)
    assert control.wait_table().tolist() == [[5], [5]]
    assert share_news(control, b"on we go") == b"on we go"
    assert control.farewell(0) == [0, 0]


def test_what_has_come_counts_even_after_an_alarm() -> None:
    alarm = Alarm()
    alarm.record = death("gone", rank=1)
    poll(lambda: True, alarm, idle=False)
    with pytest.raises(PeerFailedError):
        poll(lambda: False, alarm, idle=False)


def test_after_the_farewell_nothing_rings() -> None:
    alarm = Alarm()
    control = LocalControl(alarm)
    assert control.farewell(3) == [3]
    alarm.record = death("gone", rank=1)
    turns = iter([False, False, True])
    control.wait(lambda: next(turns), idle=False)


def test_world_of_one_receives_no_news() -> None:
    with pytest.raises(RuntimeError, match="rank 0 makes the news"):
        LocalControl(Alarm()).receive_news(nothing, idle=True)


def test_world_of_one_takes_only_wake_ups_that_were_sent() -> None:
    control = LocalControl(Alarm())
    with pytest.raises(RuntimeError, match="no wake-up"):
        control.take_wake(0)
