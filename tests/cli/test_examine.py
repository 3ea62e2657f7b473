import json
from typing import Any

import pytest
import torch

from dist_infer.cli.examine import (
    describe,
    find_collectives,
    find_pairs,
    find_rank,
    find_started,
    find_threads,
    find_versions,
    find_world,
)
from dist_infer.launch.world import World


def report(rank: int, **changes: Any) -> dict[str, Any]:
    values = {
        "rank": rank,
        "host": "node1",
        "pid": 100 + rank,
        "device": "cpu",
        "name": "x86_64",
        "free_bytes": 8 * 2**30,
        "peers": [],
        "threads": 2,
        "cores": 8,
        "versions": {"torch": "2.13.0"},
    }
    return values | changes


def test_the_world() -> None:
    found = find_world([report(0), report(1, host="node0")], "srun")
    assert str(found) == "ok     world: 2 ranks on 2 hosts (node0, node1), started by srun"
    assert "by hand" in find_world([report(0)], None).detail
    assert "fits srun" in find_started("srun")[0].detail and "needs none" in find_started(None)[0].detail


def test_a_rank() -> None:
    found = find_rank(report(3, device="cuda:1", name="NVIDIA H200", peers=[0, 2]))
    assert not found.wrong
    for text in ("cuda:1 (NVIDIA H200)", "8.0 GiB", "reaches the memory of GPUs [0, 2]", "2 threads on 8 cores"):
        assert text in found.detail
    assert "end what uses it" in find_rank(report(0, free_bytes=2**20)).wrong


def test_versions_that_differ_name_the_rank() -> None:
    assert find_versions([report(0), report(1)]).detail == "torch 2.13.0"
    found = find_versions([report(0), report(1, host="node2", versions={"torch": "2.12.0"})])
    assert "rank 1 on host node2 has torch 2.12.0, rank 0 has torch 2.13.0; install the same" in found.wrong


def test_more_threads_than_cores_are_said_with_the_setting() -> None:
    assert not find_threads([report(rank) for rank in range(4)]).wrong
    found = find_threads([report(rank, threads=8) for rank in range(4)])
    assert "4 ranks on host node1 have 32 threads on 8 cores; export OMP_NUM_THREADS=2" in found.wrong
    assert not find_threads([report(0, threads=99)]).wrong  # alone it disturbs nobody
    assert not find_threads([report(rank, threads=1, cores=2) for rank in range(4)]).wrong  # fewer than one can't be
    assert not find_threads([report(rank, threads=8, device=f"cuda:{rank}") for rank in range(4)]).wrong


@pytest.mark.ranks(2)
def test_a_world_that_is_fine(world: World) -> None:
    found = describe(world)
    assert json.loads(json.dumps(found)) == found
    assert found["rank"] == world.rank
    assert not find_collectives(world).wrong
    assert find_pairs(world) == []  # there is no GPU


@pytest.mark.ranks(2)
def test_a_sum_that_is_wrong_is_seen_by_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.rank == 1:
        monkeypatch.setattr("torch.full", lambda *args, **options: torch.zeros(3))
    assert "must be 3.0" in find_collectives(world).wrong
