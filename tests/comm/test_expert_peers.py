"""Experts through peer memory: which rows go that way, the group itself where there is none, and two GPUs."""

from typing import cast

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives, TorchCollectives
from dist_infer.comm.expert import ScatteredRows
from dist_infer.comm.expert_peers import ExpertCollectives, PeerRows, open_expert_collectives
from dist_infer.comm.expert_rows import ExpertRows
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.moe_chunks import ChunkPlan, plan_chunks
from dist_infer.comm.symmetric import PeerMemory
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.peer_rows import GATHER_LIBRARIES, SCATTER_LIBRARIES, RowsLayout
from dist_infer.launch.world import World
from tests.fake_collectives import run_group

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
TARGET = Target(device=torch.device("cpu"), dtype=torch.bfloat16)
WIDTH, TOP_K, NUM_EXPERTS = 512, 4, 10


def make_rows(num_rows: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> ExpertRows:
    ids = torch.rand(num_rows, NUM_EXPERTS, device=device).argsort(1)[:, :TOP_K].int()
    return ExpertRows(
        torch.randn(num_rows, WIDTH, device=device).to(dtype), ids, torch.rand(num_rows, TOP_K, device=device)
    )


@pytest.mark.parametrize(
    ("plan", "dtype", "taken"),
    [
        (plan_chunks((4, 4), None), torch.bfloat16, True),
        (plan_chunks((8, 8), None), torch.bfloat16, True),
        (plan_chunks((9, 9), None), torch.bfloat16, False),
        (plan_chunks((4, 3), None), torch.bfloat16, False),
        (plan_chunks((0, 0), None), torch.bfloat16, False),
        (plan_chunks((4, 4), 2), torch.bfloat16, False),
        (plan_chunks((4, 4), None, selective=True), torch.bfloat16, False),
        (plan_chunks((4, 4), None), torch.float32, False),
    ],
)
def test_few_rows_and_as_many_on_every_rank_go_this_way(plan: ChunkPlan, dtype: torch.dtype, taken: bool) -> None:
    layout = RowsLayout(num_ranks=2, max_rows=8, row_bytes=2 * WIDTH, top_k=TOP_K)
    peer_rows = PeerRows(cast(PeerMemory, None), layout, torch.bfloat16, GATHER_LIBRARIES[0], SCATTER_LIBRARIES[0])
    assert peer_rows.takes(make_rows(plan.rows(0), torch.device("cpu"), dtype), plan) == taken


def test_without_peer_memory_it_is_the_group_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def is_itself(group: Collectives) -> bool:
        return open_expert_collectives(group, TARGET, max_rows=8, hidden=WIDTH, top_k=TOP_K) is group

    assert run_group(2, is_itself) == [True, True]
    assert caplog.text.count("not GPUs of their own") == 1


def test_one_rank_needs_none(caplog: pytest.LogCaptureFixture) -> None:
    alone = SingleCollectives()
    assert open_expert_collectives(alone, TARGET, max_rows=8, hidden=WIDTH, top_k=TOP_K) is alone and not caplog.text


class Exchanges:
    """The two ways to the experts between two groups of one rank, by experts whose outputs tell them apart."""

    def __init__(self, world: World) -> None:
        mesh = Mesh.create(world=2, rank=world.rank, dp=2)
        group = world.communicators(mesh).world
        assert isinstance(group, TorchCollectives)
        target = Target(device=world.device, dtype=torch.bfloat16)
        peered = open_expert_collectives(group, target, max_rows=40, hidden=WIDTH, top_k=TOP_K)
        assert isinstance(peered, ExpertCollectives)
        self.peered, self.device = peered, world.device
        self.by_peers, self.by_gather = (
            ScatteredRows(mesh, axis, world.device, num_experts=NUM_EXPERTS, top_k=TOP_K) for axis in (peered, group)
        )
        self._rank = world.rank

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert e of rank r multiplies by e + 7 r + 1."""
        factors = torch.where(ids < 0, 0.0, weights * (ids + 7 * self._rank + 1))
        return (x.float() * factors.sum(1, keepdim=True)).to(x.dtype)

    def run(self, exchange: ScatteredRows, rows: ExpertRows) -> Tensor:
        plan = exchange.plan([len(rows)] * 2, None)
        return exchange.run(rows.x, rows.ids, rows.weights, self.experts, plan)


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_it_gives_the_bytes_of_the_other_way(world: World) -> None:
    exchanges = Exchanges(world)
    torch.manual_seed(world.rank)
    for num_rows in (1, 40, 17, 41, 40, 2, 1):
        rows = make_rows(num_rows, world.device)
        rows.x[0, :9], rows.ids[-1, 1] = -0.0, -1
        ours, theirs = exchanges.run(exchanges.by_peers, rows), exchanges.run(exchanges.by_gather, rows)
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    exchanges.peered.peer_rows.close()


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_graphs_hold_both_ways(world: World) -> None:
    """That of gathering has its collectives on a stream beside the main one."""
    exchanges = Exchanges(world)
    torch.manual_seed(world.rank)
    kinds = {num_rows: make_rows(num_rows, world.device) for num_rows in (1, 8, 40)}
    graphs = {}
    for num_rows, rows in kinds.items():
        for exchange in (exchanges.by_peers, exchanges.by_gather):
            exchanges.run(exchange, rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [exchanges.run(exchange, rows) for _ in range(3)]
            graphs[num_rows, exchange is exchanges.by_peers] = graph, outs
    for turn, num_rows in enumerate([40, 1, 8, 8, 1, 40]):
        kinds[num_rows].x.copy_(torch.randn(num_rows, WIDTH, device=world.device))
        expected = exchanges.run(exchanges.by_gather, kinds[num_rows])
        for by_peers in (True, False):
            graph, outs = graphs[num_rows, by_peers]
            for out in outs:
                out.fill_(7)
            graph.replay()
            assert all(torch.equal(out, expected) for out in outs)
        if turn % 2:
            exchanges.run(exchanges.by_peers, make_rows(3, world.device))
    del graphs
    exchanges.peered.peer_rows.close()
