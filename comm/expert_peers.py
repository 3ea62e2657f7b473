"""Experts through peer memory: few rows, as many on every rank, as a decode step has that runs as a graph.

A launch out and one back, on the stream of the computation. The bytes are those of the other ways.
"""

import logging

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.expert_rows import ExpertRows, Experts
from dist_infer.comm.moe_chunks import ChunkPlan
from dist_infer.comm.symmetric import NoPeerMemoryError, PeerMemory, open_peer_memory
from dist_infer.comm.wire import NcclWire
from dist_infer.kernels import peer_rows as op
from dist_infer.kernels.all_reduce import DTYPES
from dist_infer.kernels.dispatch import Library, Target, on_triton, resolve
from dist_infer.kernels.multiprocessors import num_multiprocessors
from dist_infer.kernels.peer_rows import GatherFunction, RowsLayout, RowsSpace, ScatterFunction

MAX_ROWS = 1024  # of a rank: beyond, bytes outweigh what a launch takes
_MIN_ROW_BYTES = 512  # a lane of the kernels for every thread

_logger = logging.getLogger(__name__)


class PeerRows:
    """The way of rows to the experts and of sums back. The same calls on all ranks, on one stream."""

    def __init__(
        self,
        memory: PeerMemory,
        layout: RowsLayout,
        dtype: torch.dtype,
        gather: Library[GatherFunction],
        scatter: Library[ScatterFunction],
    ) -> None:
        self._memory = memory
        self._layout = layout
        self._dtype = dtype
        self._gather = gather
        self._scatter = scatter

    def takes(self, rows: ExpertRows, plan: ChunkPlan) -> bool:
        """These rows go this way; the same on all ranks."""
        counts = {plan.rows(rank) for rank in range(self._layout.num_ranks)}
        fits = plan.num_chunks == 1 and not plan.selective and len(counts) == 1
        return fits and 0 < len(rows) <= self._layout.max_rows and rows.x.dtype == self._dtype

    def run(self, rows: ExpertRows, experts: Experts, held: range) -> Tensor:
        """The summed expert outputs of this rank's rows.

        Ranks: collective over the world.
        """
        x, ids, weights = op.gather_rows(
            rows.x.contiguous(), rows.ids.int(), rows.weights.float(), self._space(), held, library=self._gather
        )
        parts = experts(x, ids, weights).contiguous()
        return op.scatter_sums(parts, self._space(), library=self._scatter)

    def close(self) -> None:
        """Give the memory back; no call may follow. Ranks: collective."""
        self._memory.close()

    def _space(self) -> RowsSpace:
        self._memory.enter_stream()
        memory = self._memory.memory
        return RowsSpace(
            layout=self._layout,
            memory=memory,
            table=self._memory.table,
            rank=self._memory.rank,
            max_programs=num_multiprocessors(memory.device),
        )


class ExpertCollectives(TorchCollectives):
    """The collectives of a group of GPUs, whose few rows reach experts through peer memory."""

    def __init__(self, group: TorchCollectives, peer_rows: PeerRows) -> None:
        super().__init__(group.wire, axis=group.axis, max_whole_bytes=group.max_whole_bytes)
        self.peer_rows = peer_rows


def open_expert_collectives(
    group: Collectives, target: Target, *, max_rows: int, hidden: int, top_k: int
) -> Collectives:
    """`group` with a way to the experts through peer memory for up to `max_rows` rows of a rank.

    The group itself, and the reason in the log, where there is none.

    Ranks: collective over the group, which spans the world.
    """
    row_bytes = hidden * torch.empty((), dtype=target.dtype).element_size()
    why: str
    if not isinstance(group, TorchCollectives) or not isinstance(group.wire, NcclWire):
        why = "its ranks are not GPUs of their own" if group.size > 1 else "there is one rank"
    elif target.dtype not in DTYPES or row_bytes % 16 or row_bytes < _MIN_ROW_BYTES:
        why = f"rows are {hidden} numbers of {target.dtype}"
    elif missing := on_triton(target):
        why = missing
    else:
        layout = RowsLayout(num_ranks=group.size, max_rows=min(max_rows, MAX_ROWS), row_bytes=row_bytes, top_k=top_k)
        try:
            memory = open_peer_memory(
                group, group.wire.group, num_bytes=layout.num_bytes, device=target.device, prepare=layout.prepare
            )
        except NoPeerMemoryError as error:
            why = str(error)
        else:
            gather = resolve("gather_rows", op.GATHER_LIBRARIES, target).pick()
            scatter = resolve("scatter_sums", op.SCATTER_LIBRARIES, target).pick()
            return ExpertCollectives(group, PeerRows(memory, layout, target.dtype, gather, scatter))
    if group.rank == 0 and group.size > 1:
        _logger.warning("rows don't reach experts through peer memory, which is faster for few: %s", why)
    return group
