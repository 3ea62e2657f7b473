"""Peer memory in rank tests: ranks with a GPU each, or ranks that share one GPU under NVIDIA's multi-process service.

    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d) CUDA_MODULE_LOADING=EAGER
    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 CUDA_VISIBLE_DEVICES=0
    nvidia-cuda-mps-control -d; pytest -m gpu tests/comm; echo quit | nvidia-cuda-mps-control

Without the service the ranks of one GPU would take turns of milliseconds, in which each waits for the others.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dist_infer.comm.all_reduce import PeerRoom, open_peer_room
from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.wire import NcclWire
from dist_infer.launch.world import World

SHARED = "CUDA_MPS_PIPE_DIRECTORY" in os.environ and "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in os.environ

needs_peers = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not (SHARED and torch.cuda.is_available()),
    reason="gpu: needs two GPUs, or one with ranks under the multi-process service (tests/comm/peer_ranks.py)",
)


def skip_without_peers(world: World) -> None:
    """On all ranks alike."""
    if world.size > torch.cuda.device_count() and not SHARED:
        pytest.skip(f"gpu: needs {world.size} GPUs, or ranks under the multi-process service")


@contextmanager
def opened_room(group: Collectives, world: World, max_tokens: int = 1000, hidden: int = 7168) -> Iterator[PeerRoom]:
    """Room of the whole group. Ranks: collective over the world."""
    assert isinstance(group, TorchCollectives)
    shared = not isinstance(group.wire, NcclWire)
    room = open_peer_room(
        group,
        _gloo_group(world) if shared else group.wire.group,  # type: ignore[attr-defined]
        max_tokens=max_tokens,
        row_bytes=2 * hidden,
        device=world.device,
        num_sharing=-(-world.size // torch.cuda.device_count()),
    )
    yield room
    room.close()


@cache
def _gloo_group(world: World) -> dist.ProcessGroup:
    """A group that torch has registered: peer memory is found through its name."""
    dist.init_process_group(
        "gloo", store=PrefixStore("peer ranks", world.store), rank=world.rank, world_size=world.size
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD
