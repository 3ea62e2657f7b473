"""Experts by gathering: all rows of a chunk on every rank, and the sums of each rank's rows scattered back.

Order of collectives on every rank, G a gather and S a scatter of a chunk: G0 S0 G1 S1 ... where the host waits for
each; G0 G1 S0 G2 S1 ... on a lane that overlaps, so that S of a chunk and G of the next but one are under way while the
experts work on the next.
"""

from collections import deque
from functools import partial

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert_rows import ExpertRows, Experts
from dist_infer.comm.lane import Lane, Pending
from dist_infer.comm.moe_chunks import ChunkPlan


class GatherScatter:
    """The back-end for every layout with several groups.

    Ranks: collective over the world.
    """

    def __init__(self, world: Collectives, held: range, device: torch.device) -> None:
        self._world = world
        self._held = held
        self._lane = Lane(device)

    def run(self, rows: ExpertRows, experts: Experts, plan: ChunkPlan) -> list[Tensor]:
        """The summed expert outputs of this rank's rows, chunk by chunk.

        Shapes: rows [plan.rows(rank)] -> tensors that are as long together.
        """
        ahead = 1 if self._lane.overlaps else 0
        gathers = deque(self._gather(rows, plan, chunk) for chunk in range(min(ahead, plan.num_chunks)))
        results = []
        for chunk in range(plan.num_chunks):
            if chunk + ahead < plan.num_chunks:
                gathers.append(self._gather(rows, plan, chunk + ahead))
            part = rows.unpack(gathers.popleft().wait()).apply(experts, self._held)
            scatter = partial(self._world.reduce_scatter, part, plan.sizes(chunk))
            results.append(self._lane.start(scatter, part))
        # What a stand-in gives is dropped, but waited for: its part may not be overwritten while the peers get it.
        waited = [result.wait() for result in results]
        return [result for chunk, result in enumerate(waited) if not plan.own(self._world.rank, chunk)[1]]

    def _gather(self, rows: ExpertRows, plan: ChunkPlan, chunk: int) -> Pending:
        own, is_stand_in = plan.own(self._world.rank, chunk)
        packed = (rows.stand_in() if is_stand_in else rows.slice(own)).pack()
        return self._lane.start(partial(self._world.all_gather, packed, plan.sizes(chunk)), packed)
