"""Collectives through peer memory: the group itself where there is none, its bytes where there is."""

import pytest
import torch

from dist_infer.comm.bootstrap import Communicators
from dist_infer.comm.collectives import Collectives, SingleCollectives, TorchCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.peer_collectives import PeerCollectives, open_peer_axes, open_peer_collectives
from dist_infer.comm.wire import NcclWire
from dist_infer.kernels.dispatch import Target
from dist_infer.launch.world import World
from tests.fake_collectives import run_group

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")


@pytest.fixture(scope="module")
def group(world: World) -> Collectives:
    """All ranks on one axis."""
    return world.communicators(Mesh.create(world=world.size, rank=world.rank)).world


def test_without_peer_memory_it_is_the_group_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    target = Target(device=torch.device("cpu"), dtype=torch.bfloat16)

    def is_itself(group: Collectives) -> bool:
        return open_peer_collectives(group, target, max_tokens=8, hidden=64) is group

    assert run_group(2, is_itself) == [True, True]
    assert caplog.text.count("not GPUs of their own") == 1


def test_one_rank_needs_none(caplog: pytest.LogCaptureFixture) -> None:
    alone = SingleCollectives()
    target = Target(device=torch.device("cpu"), dtype=torch.bfloat16)
    assert open_peer_collectives(alone, target, max_tokens=8, hidden=64) is alone and not caplog.text


def test_a_model_without_peer_memory_takes_the_axes_as_they_are() -> None:
    target = Target(device=torch.device("cpu"), dtype=torch.bfloat16)

    def taken(world: Collectives) -> list[bool]:
        alone = SingleCollectives()
        found = []
        for dp, tp in ((1, world), (2, alone)):
            mesh = Mesh.create(world=2, rank=world.rank, dp=dp)
            axes = Communicators(world=world, tp=tp, dp=alone, ep=world)
            for top_k in (None, 4):
                group, everyone = open_peer_axes(axes, mesh, target, max_tokens=8, max_seqs=4, hidden=512, top_k=top_k)
                found.append(group is tp and everyone is world)
        return found

    assert run_group(2, taken) == [[True] * 4] * 2


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_all_collectives_give_the_bytes_of_the_group(group: Collectives, world: World) -> None:
    assert isinstance(group, TorchCollectives) and isinstance(group.wire, NcclWire)
    target = Target(device=world.device, dtype=torch.bfloat16)
    ours = open_peer_collectives(group, target, max_tokens=64, hidden=512)
    assert isinstance(ours, PeerCollectives) and ours.rank == world.rank and ours.size == 2
    for shape in ((5, 512), (0, 512), (64, 512), (65, 512), (3, 4, 64), (7,), (512,), ()):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            x = torch.randn(shape, device=world.device, dtype=torch.float64).to(dtype)
            assert torch.equal(ours.all_reduce(x), group.all_reduce(x))
    x = torch.arange(8.0, device=world.device).view(4, 2) + world.rank
    assert torch.equal(ours.all_gather(x), group.all_gather(x))
    assert torch.equal(ours.reduce_scatter(x), group.reduce_scatter(x))
    assert torch.equal(ours.broadcast(x, 1), group.broadcast(x, 1))
    assert torch.equal(ours.all_to_all(x, [2, 2], [2, 2]), group.all_to_all(x, [2, 2], [2, 2]))
    ours.close()


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_a_graph_holds_all_collectives(group: Collectives, world: World) -> None:
    assert isinstance(group, TorchCollectives) and isinstance(group.wire, NcclWire)
    target = Target(device=world.device, dtype=torch.bfloat16)
    ours = open_peer_collectives(group, target, max_tokens=64, hidden=512)
    assert isinstance(ours, PeerCollectives) and ours.capturable
    x = torch.zeros(4, 512, device=world.device).bfloat16()

    def calls() -> list[torch.Tensor]:
        return [
            ours.all_reduce(x),
            ours.all_gather(x),
            ours.reduce_scatter(x),
            ours.broadcast(x, 1),
            ours.all_to_all(x, [2, 2], [2, 2]),
            ours.all_reduce(x.float()),
        ]

    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for turn in range(3):
        x.copy_(torch.randn(4, 512, device=world.device) + turn)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, calls(), strict=True))
    ours.close()
