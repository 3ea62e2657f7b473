"""Peer memory: refused alike on all ranks, mapped on two GPUs."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.symmetric import NoPeerMemoryError, _attempt, _vote, open_peer_memory
from dist_infer.comm.wire import NcclWire
from dist_infer.launch import mpirun
from dist_infer.launch.world import World
from tests.fake_collectives import run_group

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group(world: World) -> Collectives:
    """All ranks on one axis."""
    return world.communicators(Mesh.create(world=world.size, rank=world.rank)).world


def _nothing(memory: Tensor) -> None:
    raise AssertionError("there is no memory to prepare")


def _fill(memory: Tensor) -> None:
    memory.fill_(7)


def _opened_on_cpu(group: Collectives) -> None:
    with pytest.raises(NoPeerMemoryError, match="rank 0 of the group: peer memory is for GPUs, not cpu"):
        open_peer_memory(group, None, num_bytes=64, device=CPU, prepare=_nothing)  # type: ignore[arg-type]


def test_cpu_ranks_have_none() -> None:
    run_group(2, _opened_on_cpu)


def _attempted(group: Collectives) -> int:
    def action() -> int:
        if group.rank == 1:
            raise RuntimeError("no more handles")
        return group.rank

    with pytest.raises(NoPeerMemoryError, match="rank 1 of the group: RuntimeError: no more handles"):
        _attempt(group, CPU, action)
    return _attempt(group, CPU, lambda: group.rank)


def test_what_fails_on_one_rank_fails_on_all_with_its_reason() -> None:
    assert run_group(3, _attempted) == [0, 1, 2]


def _voted(group: Collectives) -> None:
    with pytest.raises(NoPeerMemoryError, match="rank 2 of the group has host b, rank 0 host a"):
        _vote(group, CPU, None, agreeing="host b" if group.rank == 2 else "host a")
    with pytest.raises(NoPeerMemoryError, match="x{100}"):
        _vote(group, CPU, "x" * 9999)
    _vote(group, CPU, None, agreeing="host a")


def test_what_must_agree_is_compared() -> None:
    run_group(3, _voted)


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_peers_write_into_each_others_pieces(group: Collectives, world: World) -> None:
    assert isinstance(group, TorchCollectives) and isinstance(group.wire, NcclWire)
    memory = open_peer_memory(group, group.wire.group, num_bytes=1024, device=world.device, prepare=_fill)
    assert memory.table[world.rank] == memory.memory.data_ptr() and (memory.memory == 7).all()
    assert len(set(memory.table.tolist())) == 2
    memory.enter_stream()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        memory.enter_stream()
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        memory.enter_stream()


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_none_is_opened_while_a_graph_is_captured(group: Collectives, world: World) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="captured"):
        open_peer_memory(group, None, num_bytes=64, device=world.device, prepare=_nothing)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fault", "message"), [("kill", "signal 9"), ("exception", "rank 1 .*ValueError: broken on purpose")]
)
def test_a_rank_that_dies_while_others_wait_on_the_gpu_ends_the_job(fault: str, message: str, tmp_path: Path) -> None:
    """On whatever GPUs there are; without the multi-process service, which a killed client would bring down."""
    surroundings = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = mpirun.command(
        2,
        [sys.executable, "-m", "tests.comm.spinning_ranks", fault],
        launcher=mpirun.find_launcher(),
        oversubscribe=True,
        extra_env=surroundings,
    )
    found = mpirun.run(command, timeout_s=90, capture=True)
    assert "READY 0" in found.output and "READY 1" in found.output, found.output
    assert not found.timed_out and found.returncode != 0, found.output
    assert re.search(message, found.output) and "rank 1" in found.output, found.output
