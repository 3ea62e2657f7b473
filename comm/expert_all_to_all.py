"""Experts by all-to-all: a row goes once to each rank that holds one of its experts, to no other.

How many rows go from each rank to each in each chunk is known on the devices only. The counts of all chunks are
gathered there, and the host reads them once a layer: it needs them for the sizes of messages and of buffers. Nothing
else is read, and a rank without rows for another sends it nothing, so stand-ins are not needed.

The parts of a row come back from the ranks that it went to and are added in rank order, from +0.0, in float32 (float64
for float64), and rounded once: the bytes of GatherScatter, where every other rank adds zeros.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert_rows import ExpertRows, Experts
from dist_infer.comm.moe_chunks import ChunkPlan


class AllToAll:
    """The back-end for eager prefill with whole experts on each rank. W ranks, C chunks.

    Ranks: collective over the world.
    """

    def __init__(self, world: Collectives, expert_sizes: Sequence[int], device: torch.device) -> None:
        """`expert_sizes`: how many experts each rank holds, contiguously."""
        self._world = world
        ends = list(accumulate(expert_sizes))
        self._held = range(ends[world.rank] - expert_sizes[world.rank], ends[world.rank])
        self._ends = torch.tensor(ends, device=device)

    def run(self, rows: ExpertRows, experts: Experts, plan: ChunkPlan) -> list[Tensor]:
        """The summed expert outputs of this rank's rows, chunk by chunk."""
        rank = self._world.rank
        wanted = self._wanted(rows.ids)
        own = [plan.own(rank, chunk)[0] for chunk in range(plan.num_chunks)]
        counts = torch.stack([wanted[:, rows_of.start : rows_of.stop].sum(1) for rows_of in own])
        table = self._world.all_gather(counts[None]).tolist()  # the one host read: [W][C][W], from, chunk, to
        results = []
        for chunk, rows_of in enumerate(own):
            send_sizes = table[rank][chunk]
            recv_sizes = [source[chunk][rank] for source in table]
            sent = _columns(wanted[:, rows_of.start : rows_of.stop], sum(send_sizes))
            part = self._dispatch(rows.slice(rows_of), sent, send_sizes, recv_sizes, experts)
            back = self._world.all_to_all(part, recv_sizes, send_sizes)
            results.append(_sum_by_rank(back, sent, send_sizes, len(rows_of)))
        return results

    def _dispatch(
        self, rows: ExpertRows, sent: Tensor, send_sizes: list[int], recv_sizes: list[int], experts: Experts
    ) -> Tensor:
        """This rank's part for the rows that all ranks have sent it."""
        packed = self._world.all_to_all(rows.take(sent).pack(), send_sizes, recv_sizes)
        return rows.unpack(packed).apply(experts, self._held)

    def _wanted(self, ids: Tensor) -> Tensor:
        """Which ranks each row must go to. Shapes: [R, K] -> [W, R] bool."""
        num_ranks = self._world.size
        owners = torch.bucketize(ids.long(), self._ends, right=True).masked_fill(ids < 0, num_ranks)
        wanted = torch.zeros(num_ranks + 1, len(ids), dtype=torch.bool, device=ids.device)
        return wanted.scatter_(0, owners.t(), True)[:num_ranks]


def _columns(wanted: Tensor, num_wanted: int) -> Tensor:
    """The columns of the `num_wanted` true entries, row after row: `nonzero` that doesn't ask the device how many."""
    order = wanted.flatten().logical_not().to(torch.uint8).argsort(stable=True)
    return order[:num_wanted] % max(1, wanted.shape[1])


def _sum_by_rank(parts: Tensor, rows: Tensor, sizes: list[int], num_rows: int) -> Tensor:
    """Adds part i to row rows[i], the parts of the first rank first. Within a rank's parts a row is there once."""
    wide = torch.float64 if parts.dtype == torch.float64 else torch.float32
    total = torch.zeros(num_rows, parts.shape[1], dtype=wide, device=parts.device)
    for rank_rows, rank_parts in zip(torch.split(rows, sizes), torch.split(parts, sizes), strict=True):
        total.index_add_(0, rank_rows, rank_parts.to(wide))
    return total.to(parts.dtype)
