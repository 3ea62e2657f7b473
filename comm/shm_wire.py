"""The wire between CPU ranks of one host: messages through memory that all of them map.

Each ordered pair of ranks has a mailbox: two slots for data and a few int64 words.
    head of a slot   number of the chunk in it, tag and length of its message; written by the sender
    taken            number of the last chunk taken out; written by the receiver
Chunk c goes into slot c % 2. The sender waits until chunk c - 2 is taken, copies the data, writes tag and length, and
the number last: that publishes the chunk. The receiver waits for the number, copies the data out, and writes `taken`
last. A message longer than a slot is several chunks, of which one is written while the other is read.

Each word has one writer and is read and written whole (aligned, eight bytes). The order above is all the order there
is: CPython runs the copies and the words one after another, each in a C call of its own, which no compiler moves across
another, and x86-64 neither moves a store before an older load or store nor a load before an older load. Copies that go
past this order (non-temporal stores, which memcpy uses from some MB on) are beyond the largest slot, and libc fences
them. Other machines, ARM for one, promise none of this: there is no ShmWire on them.

Nothing blocks in C. A wait yields the core some times, because the peer is often just about to write and may need this
core for it, and then sleeps, longer each time up to a limit.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_SLOT_BYTES = 256 * 1024
MIN_SLOT_BYTES = 4096

_GROUP_BYTES = 32 << 20  # of one group, roughly: more ranks, smaller slots
_WORD = 8
_LINE = 64  # words with different writers are in different cache lines
_DATA_OFFSET = 4 * _LINE
_TAKEN = 2 * _LINE // _WORD
_TAG, _LENGTH = 1, 2  # words of a head, after the number

_NUM_YIELDS = 200
_FIRST_SLEEP_S = 10e-6
_LONGEST_SLEEP_S = 100e-6

Bytes = NDArray[np.uint8]


def slot_bytes_of(size: int) -> int:
    """Bytes of one slot in a group of `size` ranks: a power of two, the same on all of them."""
    share = _GROUP_BYTES // (2 * size * max(size - 1, 1))
    return min(max(1 << share.bit_length() - 1, MIN_SLOT_BYTES), MAX_SLOT_BYTES) if share else MIN_SLOT_BYTES


def group_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of all mailboxes of a group."""
    return size * (size - 1) * (_DATA_OFFSET + 2 * slot_bytes)


class ShmWire:
    """A Wire through shared memory, zeroed before its first use. One caller at a time."""

    device = torch.device("cpu")

    def __init__(
        self,
        memory: memoryview,
        *,
        rank: int,
        size: int,
        slot_bytes: int,
        timeout_s: float,
        on_wait: Callable[[], None],
    ) -> None:
        """`memory`: group_bytes(size, slot_bytes) of it. `on_wait` is called in long waits and may raise.

        An exchange in which nothing moves for `timeout_s` is a RuntimeError that names the peers it waits for.
        """
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        self._broken = ""
        box_bytes = _DATA_OFFSET + 2 * slot_bytes

        def mailbox(sender: int, receiver: int) -> memoryview:
            start = (sender * (size - 1) + receiver - (receiver > sender)) * box_bytes
            return memory[start : start + box_bytes]

        # From the right-hand neighbour on, so that not all ranks begin with rank 0.
        peers = [(rank + step) % size for step in range(1, size)]
        self._outboxes = [_Outbox(peer, mailbox(rank, peer)) for peer in peers]
        self._inboxes = [_Inbox(peer, mailbox(peer, rank)) for peer in peers]

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> None:
        """See Wire.

        Errors: RuntimeError, after which the wire is of no more use: a peer's message has another tag or length; a
        peer does not come in time. And what `on_wait` raises.
        """
        if self._broken:
            raise RuntimeError(f"this wire failed before: {self._broken}")
        waiting: list[_Box] = []
        try:
            for outbox in self._outboxes:
                data = sends[outbox.peer]
                if data.numel() and not outbox.begin(data.numpy(), tag):
                    waiting.append(outbox)
            for inbox in self._inboxes:
                data = recvs[inbox.peer]
                if data.numel() and not inbox.begin(data.numpy(), tag):
                    waiting.append(inbox)
            if waiting:
                self._wait_for(waiting)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise

    def _wait_for(self, boxes: "list[_Box]") -> None:
        """Move what can be moved until all has been."""
        yields, sleep_s = _NUM_YIELDS, _FIRST_SLEEP_S
        limit_s: float | None = None
        while True:
            before = sum(box.chunk for box in boxes)
            boxes = [box for box in boxes if not box.advance()]
            if not boxes:
                return
            if sum(box.chunk for box in boxes) != before:
                yields, sleep_s, limit_s = _NUM_YIELDS, _FIRST_SLEEP_S, None
            elif yields:
                yields -= 1
                os.sched_yield()
            else:
                self._on_wait()
                now = time.monotonic()
                if limit_s is None:
                    limit_s = now + self._timeout_s
                elif now > limit_s:
                    raise RuntimeError(f"{'; '.join(box.due() for box in boxes)} in {self._timeout_s:g} s")
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


class _Box:
    """One side of a mailbox, and the message that is passing through it."""

    __slots__ = ("_data", "_done", "_slots", "_tag", "_words", "chunk", "peer", "slot_bytes")

    def __init__(self, peer: int, memory: memoryview) -> None:
        self.peer = peer
        self.chunk = 1  # the number of the next one
        self.slot_bytes = (len(memory) - _DATA_OFFSET) // 2
        self._words: Any = memory[:_DATA_OFFSET].cast("q")
        data = np.frombuffer(memory[_DATA_OFFSET:], np.uint8)
        self._slots: tuple[Bytes, Bytes] = data[: self.slot_bytes], data[self.slot_bytes :]
        self._data = data[:0]
        self._done = self._tag = 0

    def begin(self, data: Bytes, tag: int) -> bool:
        """Take on a message, and see advance."""
        self._data = data
        self._done = 0
        self._tag = tag
        return self.advance()

    def advance(self) -> bool:
        """Move the chunks that can be moved now; True when the message is through."""
        raise NotImplementedError

    def due(self) -> str:
        """What the peer has not done."""
        raise NotImplementedError


class _Outbox(_Box):
    """The sender's side."""

    __slots__ = ()

    def advance(self) -> bool:
        """See _Box."""
        words, data, slot_bytes = self._words, self._data, self.slot_bytes
        length = len(data)
        while self._done < length:
            chunk = self.chunk
            if words[_TAKEN] < chunk - 2:
                return False
            which = chunk & 1
            head = which * (_LINE // _WORD)
            end = min(self._done + slot_bytes, length)
            self._slots[which][: end - self._done] = data[self._done : end]
            words[head + _TAG] = self._tag
            words[head + _LENGTH] = length
            words[head] = chunk  # last: the data is there
            self.chunk = chunk + 1
            self._done = end
        return True

    def due(self) -> str:
        """See _Box."""
        return f"rank {self.peer} did not take {len(self._data)} bytes with tag {self._tag} (it took {self._taken()})"

    def _taken(self) -> int:
        return max(0, self._done - (self.chunk - 1 - int(self._words[_TAKEN])) * self.slot_bytes)


class _Inbox(_Box):
    """The receiver's side."""

    __slots__ = ()

    def advance(self) -> bool:
        """See _Box. Errors: RuntimeError for a message of another call."""
        words, data, slot_bytes = self._words, self._data, self.slot_bytes
        length = len(data)
        while self._done < length:
            chunk = self.chunk
            which = chunk & 1
            head = which * (_LINE // _WORD)
            if words[head] != chunk:
                return False
            if words[head + _TAG] != self._tag or words[head + _LENGTH] != length:
                raise RuntimeError(
                    f"rank {self.peer} is in another call: it sent {words[head + _LENGTH]} bytes with tag"
                    f" {words[head + _TAG]}, due were {length} bytes with tag {self._tag}"
                )
            end = min(self._done + slot_bytes, length)
            data[self._done : end] = self._slots[which][: end - self._done]
            words[_TAKEN] = chunk  # last: the slot may be written again
            self.chunk = chunk + 1
            self._done = end
        return True

    def due(self) -> str:
        """See _Box."""
        return f"rank {self.peer} did not send {len(self._data)} bytes with tag {self._tag} ({self._done} came)"
