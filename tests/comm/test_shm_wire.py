"""Mailboxes in shared memory: chunks, waits, failures, and the order of the words that publish."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.comm.bootstrap import open_process_groups, open_store
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.shm_wire import (
    MAX_SLOT_BYTES,
    MIN_SLOT_BYTES,
    Bytes,
    ShmWire,
    _Box,
    _Inbox,
    _Outbox,
    group_bytes,
    slot_bytes_of,
)
from dist_infer.errors import PeerFailedError
from tests.comm.test_shm_segment import own_files
from tests.comm.thread_wires import on_shm, shm_wires

SLOT = MIN_SLOT_BYTES
LENGTHS = [0, 1, 63, 129, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT - 1, 2 * SLOT, 2 * SLOT + 1, 5 * SLOT + 7, 5_000_000]
NOTHING = torch.empty(0, dtype=torch.uint8)


def _message(length: int, seed: int) -> Tensor:
    return torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _exchange(wire: ShmWire, length_from: Sequence[int], turn: int) -> None:
    """Rank s sends length_from[s] bytes, other ones each turn and to each rank; all must come."""
    peers = range(wire.size)
    sends = [_message(length_from[wire.rank], 100 * turn + 10 * wire.rank + peer) for peer in peers]
    recvs = [torch.zeros(length_from[peer], dtype=torch.uint8) for peer in peers]
    wire.exchange(sends, recvs, turn)
    for peer in set(peers) - {wire.rank}:
        assert torch.equal(recvs[peer], _message(length_from[peer], 100 * turn + 10 * peer + wire.rank)), (peer, turn)


@pytest.mark.parametrize("size", [2, 3])
def test_every_length_comes_whole_again_and_again(size: int) -> None:
    def main(wire: ShmWire) -> None:
        for turn, length in enumerate([*LENGTHS, *LENGTHS[-2::-1]]):
            _exchange(wire, [length] * size, turn)

    on_shm(shm_wires(size, SLOT), main)


def test_lengths_may_differ_by_direction() -> None:
    def main(wire: ShmWire) -> None:
        for turn in range(24):
            _exchange(wire, [LENGTHS[turn % 11], LENGTHS[(5 * turn + 3) % 11], LENGTHS[(7 * turn + 1) % 11]], turn)

    on_shm(shm_wires(3, SLOT), main)


def test_late_rank_is_waited_for() -> None:
    """First to write into mailboxes that others wait at, then to take what fills both slots."""

    def main(wire: ShmWire) -> None:
        for turn, length in enumerate([10, 3 * SLOT, 10, 10, 10]):
            if turn % wire.size == wire.rank:
                time.sleep(0.02)
            _exchange(wire, [length] * wire.size, turn)

    on_shm(shm_wires(3, SLOT), main)


def test_silent_peer_is_named_in_time_and_the_wire_is_out_of_use() -> None:
    first, _ = shm_wires(2, SLOT, timeout_s=0.1)
    sends, recvs = [NOTHING, _message(9, seed=1)], [NOTHING, torch.zeros(7, dtype=torch.uint8)]
    with pytest.raises(RuntimeError, match=r"rank 1 did not send 7 bytes with tag 3 \(0 came\) in 0\.1 s"):
        first.exchange(sends, recvs, 3)
    with pytest.raises(RuntimeError, match="this wire failed before: rank 1 did not send"):
        first.exchange(sends, recvs, 4)


def test_peer_that_takes_nothing_is_named() -> None:
    first, second = shm_wires(2, SLOT, timeout_s=0.1)
    first.exchange([NOTHING, _message(SLOT, seed=1)], [NOTHING] * 2, 0)
    out = torch.zeros(SLOT, dtype=torch.uint8)
    second.exchange([NOTHING] * 2, [out, NOTHING], 0)
    with pytest.raises(RuntimeError, match=r"rank 1 did not take 20000 bytes with tag 1 \(it took 0\) in 0\.1 s"):
        first.exchange([NOTHING, _message(20000, seed=1)], [NOTHING] * 2, 1)


@pytest.mark.parametrize(
    ("tags", "lengths", "named"),
    [
        ((4, 5), (6, 6), ["6 bytes with tag 4, due were 6 bytes with tag 5", "with tag 5, due were"]),
        ((4, 4), (6, 8), ["6 bytes with tag 4, due were 8 bytes with tag 4", "8 bytes with tag 4, due were 6"]),
    ],
    ids=["tag", "length"],
)
def test_peer_in_another_call_is_named_with_both(
    tags: tuple[int, int], lengths: tuple[int, int], named: list[str]
) -> None:
    def main(wire: ShmWire) -> None:
        length = lengths[wire.rank]
        out = torch.full((length,), 77, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=rf"rank {1 - wire.rank} is in another call: it sent") as caught:
            wire.exchange([_message(length, 1)] * 2, [out] * 2, tags[wire.rank])
        assert named[1 - wire.rank] in str(caught.value)
        assert out.tolist() == [77] * length  # nothing was taken

    on_shm(shm_wires(2, SLOT), main)


def test_known_failure_ends_a_wait() -> None:
    calls = []

    def alarm() -> None:
        calls.append(0)
        if len(calls) == 3:
            raise PeerFailedError("rank 1 failed: killed")

    first = shm_wires(2, SLOT, on_wait=alarm)[0]
    with pytest.raises(PeerFailedError, match="^rank 1 failed: killed$"):
        first.exchange([NOTHING] * 2, [NOTHING, torch.zeros(5, dtype=torch.uint8)], 0)


def test_slots_shrink_as_the_group_grows() -> None:
    sizes = [slot_bytes_of(size) for size in range(2, 300)]
    assert sizes[0] == MAX_SLOT_BYTES and sizes[-1] == MIN_SLOT_BYTES
    assert sizes == sorted(sizes, reverse=True) and all(size & size - 1 == 0 for size in sizes)
    assert [group_bytes(size, slot_bytes_of(size)) <= 34 << 20 for size in (1, 2, 4, 8, 16, 64)] == [True] * 6


class _Spy:
    """The words of a mailbox; each write to `word` first calls `look`."""

    def __init__(self, words: memoryview, word: Callable[[int], bool], look: Callable[[], None]) -> None:
        self._words, self._word, self._look = words, word, look

    def __getitem__(self, idx: int) -> int:
        value: int = self._words[idx]
        return value

    def __setitem__(self, idx: int, value: int) -> None:
        if self._word(idx):
            self._look()
        self._words[idx] = value


class _HastyOutbox(_Outbox):
    """Planted fault: the number of a chunk is written before its data."""

    __slots__ = ()

    def advance(self) -> bool:
        """Publish first."""
        self._words[(self.chunk & 1) * 8] = self.chunk
        return super().advance()


class _HastyInbox(_Inbox):
    """Planted fault: a slot is given back before its data is out."""

    __slots__ = ()

    def advance(self) -> bool:
        """Give back first."""
        self._words[16] = self.chunk
        return super().advance()


def _seen_when(box: _Box, is_word: Callable[[int], bool], data: Bytes, watched: Callable[[], Bytes]) -> list[bytes]:
    """What is in `watched` at each write of a word while a message passes."""
    seen: list[bytes] = []
    box._words = _Spy(box._words, is_word, lambda: seen.append(watched().tobytes()))
    assert box.begin(data, tag=1)
    return seen


@pytest.mark.parametrize("hasty", [False, True])
def test_data_is_in_the_slot_before_its_number_is(hasty: bool) -> None:
    """In the order of the program, which on x86-64 is the order that the peer sees."""
    box = (_HastyOutbox if hasty else _Outbox)(1, memoryview(bytearray(256 + 2 * SLOT)))
    message = _message(100, seed=5).numpy()
    slot = box._slots[1]
    seen = _seen_when(box, lambda idx: idx in (0, 8), message, lambda: slot[:100])
    assert (seen[0] == message.tobytes()) == (not hasty)


@pytest.mark.parametrize("hasty", [False, True])
def test_data_is_out_of_the_slot_before_it_is_given_back(hasty: bool) -> None:
    memory = memoryview(bytearray(256 + 2 * SLOT))
    message = _message(100, seed=5).numpy()
    _Outbox(1, memory).begin(message, tag=1)
    out = np.zeros(100, np.uint8)
    seen = _seen_when((_HastyInbox if hasty else _Inbox)(0, memory), lambda idx: idx == 16, out, lambda: out)
    assert (seen[0] == message.tobytes()) == (not hasty)


CHILD = """
import os, signal, sys, torch
from dist_infer.comm.bootstrap import connect_store, open_process_groups
from dist_infer.comm.mesh import Mesh

class Words:
    def __init__(self, words):
        self.words = words
    def __getitem__(self, idx):
        return self.words[idx]
    def __setitem__(self, idx, value):
        if value == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        self.words[idx] = value

store = connect_store("127.0.0.1", int(sys.argv[1]), size=2, timeout_s=60.0)
mesh = Mesh.create(world=2, rank=1)
groups = open_process_groups(mesh=mesh, store=store, backend="shm", device=torch.device("cpu"), timeout_s=60.0)
inbox = groups.world.wire._inboxes[0]
inbox._words = Words(inbox._words)
groups.world.all_reduce(torch.ones(4_000_000))
"""


def test_peer_killed_within_a_message_is_an_error_in_time_and_leaves_nothing() -> None:
    store = open_store(rank=0, size=2, host="127.0.0.1", announce=lambda data: data or b"")
    child = subprocess.Popen([sys.executable, "-P", "-c", CHILD, str(store.port)])
    try:
        mesh = Mesh.create(world=2, rank=0)
        groups = open_process_groups(mesh=mesh, store=store, backend="shm", device=torch.device("cpu"), timeout_s=60.0)
        assert own_files() == []
        wire = groups.world.wire  # type: ignore[attr-defined]
        wire._timeout_s = 2.0
        with pytest.raises(PeerFailedError, match=r"all_reduce over axis world failed on its rank 0 of 2: rank 1 did"):
            groups.world.all_reduce(torch.ones(4_000_000))
        assert child.wait(30.0) == -signal.SIGKILL
        assert wire._inboxes[0].chunk > 1  # it was under way
        assert own_files() == []
    finally:
        child.kill()
        child.wait(30.0)
