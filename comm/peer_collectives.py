"""Collectives of a GPU group whose sums go through peer memory, and what follows a sum with them."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from dist_infer.comm.all_reduce import FusedAllReduce, FusedOp, open_peer_room
from dist_infer.comm.bootstrap import Communicators
from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.expert_peers import open_expert_collectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.strategy import Strategy
from dist_infer.comm.symmetric import NoPeerMemoryError
from dist_infer.comm.wire import NcclWire
from dist_infer.kernels.all_reduce import DTYPES
from dist_infer.kernels.dispatch import Target, on_triton

_logger = logging.getLogger(__name__)


class PeerCollectives:
    """`Collectives` as another object has them, but for the sums of all ranks; one stream at a time."""

    def __init__(self, group: TorchCollectives, reducer: FusedAllReduce) -> None:
        self.rank = group.rank
        self.size = group.size
        self.capturable = group.capturable
        self.reducer = reducer
        self._group = group

    @property
    def wire_bytes(self) -> dict[str, int]:
        """See Collectives: what goes through peer memory isn't counted."""
        return self._group.wire_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Collectives."""
        rows = x.view(-1, x.shape[-1]) if x.dim() > 1 and x.numel() else x.view(1, -1)
        if x.dtype not in DTYPES or x.numel() == 0 or rows.shape[1] * x.element_size() % 16:
            return self._group.all_reduce(x)
        return self.reducer(rows, FusedOp.NONE).total.view(x.shape)

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See Collectives."""
        return self._group.all_gather(x, sizes)

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """See Collectives."""
        return self._group.reduce_scatter(x, sizes)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """See Collectives."""
        return self._group.broadcast(x, root)

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        """See Collectives."""
        return self._group.all_to_all(x, send_sizes, recv_sizes)

    def close(self) -> None:
        """Give the peer memory back. Ranks: collective."""
        self.reducer.close()


def open_peer_collectives(
    group: Collectives, target: Target, *, max_tokens: int, hidden: int, strategy: Strategy = Strategy.AUTO
) -> Collectives:
    """`group` with its sums through peer memory; the group itself, and the reason in the log, where there is none.

    Room is made for `max_tokens` rows of `hidden` elements.

    Ranks: collective over the group.
    """
    why: str
    if not isinstance(group, TorchCollectives) or not isinstance(group.wire, NcclWire):
        why = "its ranks are not GPUs of their own" if group.size > 1 else "there is one rank"
    elif target.dtype not in DTYPES:
        why = f"the sums are of {target.dtype}"
    elif missing := on_triton(target):
        why = missing
    else:
        try:
            room = open_peer_room(
                group,
                group.wire.group,
                max_tokens=max_tokens,
                row_bytes=hidden * torch.empty((), dtype=target.dtype).element_size(),
                device=target.device,
            )
        except NoPeerMemoryError as error:
            why = str(error)
        else:
            return PeerCollectives(group, FusedAllReduce(group, target, room=room, strategy=strategy))
    if group.rank == 0 and group.size > 1:
        _logger.warning("all-reduces don't go through peer memory, which is faster: %s", why)
    return group


def open_peer_axes(
    axes: Communicators, mesh: Mesh, target: Target, *, max_tokens: int, max_seqs: int, hidden: int, top_k: int | None
) -> tuple[Collectives, Collectives]:
    """The collectives of a model's group and those of all ranks, through peer memory where that is to be had.

    For steps of up to `max_tokens`, or `max_seqs` of one token each, a group. `top_k` experts a token; None: the model
    has no experts.

    Ranks: collective over the world.
    """
    tp = open_peer_collectives(axes.tp, target, max_tokens=max_tokens, hidden=hidden)
    if mesh.dp == 1:
        return tp, tp
    if top_k is None:
        return tp, axes.world
    return tp, open_expert_collectives(axes.world, target, max_rows=max_seqs, hidden=hidden, top_k=top_k)
