"""One exchange of bytes between the ranks of a group: all that the collectives need from torch.distributed.

Gloo sends point to point: its own all-gather wants equal sizes and its all-to-all wants the input once per receiver.
NCCL has a grouped send and receive with free sizes, its list form of all-to-all.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Wire(Protocol):
    """A group of ranks that can exchange bytes."""

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        ...

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> None:
        """Sends `sends[p]` to every other rank p and fills `recvs[p]` from it. The own entries are ignored.

        Shapes: one flat uint8 tensor a rank; an empty one is no message, on both sides.
        Ranks: collective; sizes and `tag` agree on both sides of each pair.
        Stream: NCCL on the current stream; gloo returns when the bytes are there.
        """
        ...


class GlooWire:
    """Gloo over TCP. CUDA tensors are staged through host memory, so that several ranks can share one GPU."""

    def __init__(self, group: dist.ProcessGroupGloo, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.device = device

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> None:
        """See Wire."""
        if self.device.type == "cpu":
            self._exchange_host(sends, recvs, tag)
            return
        staged = {id(x): x.cpu() for x in sends}
        landing = [torch.empty(x.numel(), dtype=torch.uint8) for x in recvs]
        self._exchange_host([staged[id(x)] for x in sends], landing, tag)
        for peer in self._peers():
            recvs[peer].copy_(landing[peer])

    def _exchange_host(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> None:
        peers = self._peers()
        # Receives first: a message that finds its buffer posted is not kept waiting in the socket.
        works = [self.group.recv([recvs[p]], p, tag) for p in peers if recvs[p].numel() > 0]  # type: ignore[attr-defined]
        works += [self.group.send([sends[p]], p, tag) for p in peers if sends[p].numel() > 0]  # type: ignore[attr-defined]
        for work in works:
            work.wait()

    def _peers(self) -> list[int]:
        """The others, from the right-hand neighbour on, so that not all ranks send to rank 0 first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class NcclWire:
    """NCCL between GPUs. Everything is ordered on the current stream; the host doesn't wait."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group  # torch's, registered: peer memory is found through its name
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> None:
        """See Wire. NCCL knows no tags: calls pair up by their order."""
        outgoing, incoming = list(sends), list(recvs)
        outgoing[self.rank] = incoming[self.rank] = self._nothing
        options = dist.AllToAllOptions()
        options.asyncOp = False
        work = self.group.alltoall(incoming, outgoing, options)
        if work is not None:  # None where torch has put it on the current stream and there is nothing to wait for
            work.wait()
