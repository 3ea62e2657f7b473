"""Memory that all GPUs of a group map: every rank has one piece, and a table of the addresses of all.

Torch's symmetric memory makes it, without multicast. Opening goes by votes: where one rank can't, none does, and all
say the same reason. Kernels on this memory wait for their peers, so a piece serves the calls of one stream at a time.
"""

import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from dist_infer.comm.collectives import Collectives

_BALLOT_BYTES = 256

T = TypeVar("T")


class NoPeerMemoryError(Exception):
    """There is no peer memory between these ranks; the reason is the same on all of them."""


class PeerMemory:
    """This rank's piece, which the peers write too.

    Shapes: memory [num_bytes] uint8; table [ranks] int64 on the device, where the piece of each rank is mapped here.
    """

    def __init__(self, memory: Tensor, table: Tensor, handle: object, group: Collectives) -> None:
        """See open_peer_memory. `handle` keeps the peers' pieces mapped."""
        self.rank = group.rank
        self.size = group.size
        self._opened: tuple[Tensor, Tensor, object] | None = (memory, table, handle)
        self._group = group
        self._stream: torch.cuda.Stream | None = None

    @property
    def memory(self) -> Tensor:
        """This rank's piece. Errors: ValueError when it is closed."""
        return self._parts()[0]

    @property
    def table(self) -> Tensor:
        """Addresses of all ranks' pieces. Errors: ValueError when it is closed."""
        return self._parts()[1]

    def _parts(self) -> tuple[Tensor, Tensor, object]:
        if self._opened is None:
            raise ValueError("this peer memory is closed")
        return self._opened

    def enter_stream(self) -> None:
        """Call before a kernel on this memory: it waits for those on the stream that was used before.

        Stream: captured calls stay where their graph is replayed, which must be the stream of the other calls.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def close(self) -> None:
        """Unmap all pieces, when no rank uses them any more; a second call does nothing.

        Ranks: collective.
        """
        if self._opened is None:
            return
        torch.cuda.synchronize(self._opened[0].device)
        _vote(self._group, self._opened[0].device, None)
        self._opened = None


def open_peer_memory(
    group: Collectives,
    process_group: dist.ProcessGroup,
    *,
    num_bytes: int,
    device: torch.device,
    prepare: Callable[[Tensor], None],
) -> PeerMemory:
    """A piece of `num_bytes` on every rank; `prepare` has run on all of them before anyone comes back.

    `process_group` is torch's group, registered, of the same ranks as `group`.

    Ranks: collective over the group, whatever fails on one of them.
    Errors: NoPeerMemoryError, the same on all ranks; ValueError while a graph is captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("peer memory can't be opened while a CUDA graph is captured: open it before")
    _vote(group, device, _obstacle(device), agreeing=f"{socket.gethostname()}, {num_bytes} bytes")
    memory = _attempt(group, device, lambda: symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device))
    handle = _attempt(group, device, lambda: symmetric_memory.rendezvous(memory, process_group))
    table = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)

    def make_ready() -> None:
        prepare(memory)
        torch.cuda.synchronize(device)

    _attempt(group, device, make_ready)
    return PeerMemory(memory, table, handle, group)


def _obstacle(device: torch.device) -> str | None:
    """Why this rank can't have peer memory, as far as it can see alone."""
    if device.type != "cuda":
        return f"peer memory is for GPUs, not {device.type}"
    others = [idx for idx in range(torch.cuda.device_count()) if idx != device.index]
    far = [idx for idx in others if not torch.cuda.can_device_access_peer(device, idx)]
    return f"{device} has no peer access to {', '.join(f'cuda:{idx}' for idx in far)}" if far else None


def _attempt(group: Collectives, device: torch.device, action: Callable[[], T]) -> T:
    """What `action` gives, where it went well on all ranks."""
    made: list[T] = []
    failed: str | None = None
    try:
        made.append(action())
    except RuntimeError as error:
        failed = f"{type(error).__name__}: {error}"
    _vote(group, device, failed)
    return made[0]


def _vote(group: Collectives, device: torch.device, failed: str | None, *, agreeing: str = "") -> None:
    """All ranks wait for each other here.

    Errors: NoPeerMemoryError with the first rank's reason, or where what must agree differs.
    """
    text = ("-" + failed if failed is not None else "+" + agreeing).encode()[:_BALLOT_BYTES]
    own = torch.zeros(1, _BALLOT_BYTES, dtype=torch.uint8)
    own[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    ballots = group.all_gather(own.to(device)).cpu()
    texts = [bytes(ballot.tolist()).rstrip(b"\0").decode(errors="replace") for ballot in ballots]
    for rank, ballot in enumerate(texts):
        if ballot.startswith("-"):
            raise NoPeerMemoryError(f"rank {rank} of the group: {ballot[1:]}")
    if differing := _differing(texts):
        raise NoPeerMemoryError(differing)


def _differing(texts: Sequence[str]) -> str | None:
    for rank, text in enumerate(texts):
        if text != texts[0]:
            return f"rank {rank} of the group has {text[1:]}, rank 0 {texts[0][1:]}"
    return None
