"""How token rows reach the experts, which are dealt over the whole world, and how the results come back.

    AllReduce      one group (D = 1): every rank holds all rows; the experts held here, then one sum over the world
    GatherScatter  several groups: each rank holds rows of its own; all rows of a chunk are gathered on every rank and
                   the sums scattered back. The only way with MoE tensor parallelism (M > 1)
    AllToAll       several groups, M = 1: a row goes once to each rank that holds one of its experts. The host must
                   learn the counts, one read a layer, so it is for eager prefill, where bytes outweigh the wait
    PeerRows       several groups on GPUs that map each other's memory: as GatherScatter in two launches, for few rows,
                   as many on every rank

The last three give the same bytes: an expert sees the same rows in the same order either way, and the parts of a row
are added in rank order. So the choice between them is one of speed only; it follows from the agreed table and from the
layout, hence is the same on all ranks. R rows, D model, K experts a row.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert_all_to_all import AllToAll
from dist_infer.comm.expert_gather import GatherScatter
from dist_infer.comm.expert_peers import ExpertCollectives
from dist_infer.comm.expert_rows import ExpertRows, Experts, counted_from
from dist_infer.comm.mesh import Mesh, split_range, split_sizes
from dist_infer.comm.moe_chunks import ChunkPlan, plan_chunks

# AllToAll pays for its read of the counts and for one collective more by bytes that it doesn't send. Measured by
# benchmarks/bench_expert.py: faster from these rows of all ranks on, if it saves more than this part of GatherScatter's
# bytes; so never on two ranks, where two H200 lose 0.6 ms a layer by it at any size.
_MIN_SELECTIVE_ROWS = 512
_MIN_SAVING = 0.5


class ExpertExchange(Protocol):
    """The way of a layout to the experts and back. All ranks make the same calls in the same order."""

    def plan(self, rank_tokens: Sequence[int], max_tokens: int | None, *, eager_prefill: bool = False) -> ChunkPlan:
        """The chunks of a step, the same on all ranks and for all its MoE layers.

        `rank_tokens` are the agreed tokens of every rank of the world, 0 where it runs a dummy. `max_tokens` bounds the
        rows of all ranks in a chunk. `eager_prefill`: the agreed step prefills and is not captured in a graph.
        """
        ...

    def run(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts, plan: ChunkPlan) -> Tensor:
        """The summed expert outputs of this rank's rows.

        The plan tells how many rows are real. Those behind them are padding or a dummy: they are neither sent nor
        computed and come back as zeros. An id of -1 is no expert.

        Shapes: x [R, D], topk_ids [R, K] int32 or int64, topk_weights [R, K] -> [R, D].
        Ranks: collective over the world.
        Errors: ValueError for shapes that don't fit each other or the plan.
        """
        ...


def open_expert_exchange(
    mesh: Mesh, world: Collectives, device: torch.device, *, num_experts: int, top_k: int
) -> ExpertExchange:
    """The exchange of a layout: rank ep_rank holds split_range(num_experts, ep, ep_rank).

    Ranks: `world` spans the mesh; nothing is sent.
    """
    if (world.rank, world.size) != (mesh.rank, mesh.world):
        raise ValueError(f"experts: rank {world.rank} of {world.size} is not rank {mesh.rank} of {mesh.world}")
    if mesh.dp == 1:
        return AllReduce(mesh, world, num_experts=num_experts)
    return ScatteredRows(mesh, world, device, num_experts=num_experts, top_k=top_k)


class AllReduce:
    """One group: all ranks hold all rows. Chunks bound what the experts work on at a time; there is one sum."""

    def __init__(self, mesh: Mesh, world: Collectives, *, num_experts: int) -> None:
        self.held = split_range(num_experts, mesh.ep, mesh.ep_rank)
        self._holds_all = len(self.held) == num_experts
        self._world = world

    def plan(self, rank_tokens: Sequence[int], max_tokens: int | None, *, eager_prefill: bool = False) -> ChunkPlan:
        """See ExpertExchange. The rows are the same on all ranks, so the plan is for one."""
        if len(rank_tokens) != self._world.size or len(set(rank_tokens)) != 1:
            raise ValueError(f"experts: {self._world.size} ranks of one group can't have {list(rank_tokens)} tokens")
        return plan_chunks(rank_tokens[:1], max_tokens)

    def run(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts, plan: ChunkPlan) -> Tensor:
        """See ExpertExchange."""
        if not self._holds_all:
            topk_ids = counted_from(topk_ids, self.held)
        return self.sum(self.run_part(x, topk_ids, topk_weights, experts, plan))

    def run_part(self, x: Tensor, held_ids: Tensor, topk_weights: Tensor, experts: Experts, plan: ChunkPlan) -> Tensor:
        """This rank's part of what `run` gives, for a caller that has the sum over the world made with what follows it.

        Ids count the experts held here, -1 is any other.

        Ranks: local.
        """
        rows = _real_rows(x, held_ids, topk_weights, plan.rows(0))
        parts = (_compute(rows.slice(plan.own(0, chunk)[0]), experts) for chunk in range(plan.num_chunks))
        if plan.num_chunks == 1:
            return _padded(list(parts), x)
        total = torch.zeros_like(x)
        for chunk, part in enumerate(parts):
            own, _ = plan.own(0, chunk)
            total[own.start : own.stop] = part
        return total

    def sum(self, part: Tensor) -> Tensor:
        """The parts of all ranks together. Ranks: collective over the world."""
        return part if self._world.size == 1 else self._world.all_reduce(part)


class ScatteredRows:
    """Several groups: each rank holds rows of its own."""

    def __init__(self, mesh: Mesh, world: Collectives, device: torch.device, *, num_experts: int, top_k: int) -> None:
        self._mesh = mesh
        self._held = split_range(num_experts, mesh.ep, mesh.ep_rank)
        self._gather = GatherScatter(world, self._held, device)
        self._peers = world.peer_rows if isinstance(world, ExpertCollectives) else None
        # The part of the bytes saved if experts are chosen evenly: that a row has no expert on some other rank.
        saving = (1 - 1 / mesh.world) ** top_k
        self._select: AllToAll | None = None
        if mesh.moe_tp == 1 and saving > _MIN_SAVING:
            self._select = AllToAll(world, split_sizes(num_experts, mesh.ep), device)

    def plan(self, rank_tokens: Sequence[int], max_tokens: int | None, *, eager_prefill: bool = False) -> ChunkPlan:
        """See ExpertExchange. A rank's rows are its slice of its group's tokens, so that none is sent twice."""
        mesh = self._mesh
        groups = [rank_tokens[mesh.root_of(group)] for group in range(mesh.dp)]
        if list(rank_tokens) != [tokens for tokens in groups for _ in range(mesh.tp)]:
            raise ValueError(f"experts: {mesh.dp} groups of {mesh.tp} ranks can't have {list(rank_tokens)} tokens")
        rows = [rows for tokens in groups for rows in split_sizes(tokens, mesh.tp)]
        selective = eager_prefill and self._select is not None and sum(rows) >= _MIN_SELECTIVE_ROWS
        return plan_chunks(rows, max_tokens, selective=selective)

    def run(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, experts: Experts, plan: ChunkPlan) -> Tensor:
        """See ExpertExchange."""
        rows = _real_rows(x, topk_ids, topk_weights, plan.rows(self._mesh.rank))
        if self._peers is not None and self._peers.takes(rows, plan):
            return _padded([self._peers.run(rows, experts, self._held)], x)
        if not plan.selective:
            return _padded(self._gather.run(rows, experts, plan), x)
        if self._select is None:
            raise ValueError("experts: this layout has no all-to-all, but the plan asks for it")
        return _padded(self._select.run(rows, experts, plan), x)


def _compute(rows: ExpertRows, experts: Experts) -> Tensor:
    return experts(rows.x, rows.ids, rows.weights)


def _real_rows(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_rows: int) -> ExpertRows:
    if x.dim() != 2 or topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or len(x) != len(topk_ids):
        raise ValueError(
            f"experts: x {list(x.shape)}, ids {list(topk_ids.shape)} and weights {list(topk_weights.shape)} are not"
            " [R, D], [R, K] and [R, K]"
        )
    if len(x) < num_rows:
        raise ValueError(f"experts: the plan gives this rank {num_rows} rows, but x has {len(x)}")
    return ExpertRows(x, topk_ids, topk_weights).slice(range(num_rows))


def _padded(results: list[Tensor], x: Tensor) -> Tensor:
    """The results one below the other, then zeros for the rows of `x` that are left."""
    num_missing = len(x) - sum(len(result) for result in results)
    if num_missing or not results:
        results = [*results, x.new_zeros(num_missing, x.shape[1])]
    return results[0] if len(results) == 1 else torch.cat(results)
