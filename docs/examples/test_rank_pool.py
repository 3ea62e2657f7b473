"""Tests of your own on MPI ranks: rank 0 runs the test, the pool runs functions on every rank.

    mpirun -n 2 python -m mpi4py -m pytest -x --with-mpi docs/examples

A function gets the rank's `world` first, may use whatever that offers, and gives back what pickles. A failure comes to
rank 0 as one RemoteError with the traceback of each rank that failed, and the pool goes on.
"""

from typing import Any

import pytest

from dist_infer.comm.mesh import Mesh
from dist_infer.launch.failure import RemoteError
from dist_infer.launch.pool import Pool
from dist_infer.launch.world import World


def sum_over_ranks(world: World, value: float) -> list[float]:
    import torch  # inside: what is sent to the ranks must pickle

    collectives = world.communicators(Mesh.create(world=world.size, rank=world.rank)).world
    return collectives.all_reduce(torch.full((2,), value * (world.rank + 1))).tolist()


def fail_on_last_rank(world: World) -> int:
    if world.rank == world.size - 1:
        raise ValueError(f"rank {world.rank} has no luck")
    return world.rank


@pytest.mark.mpi(min_size=2)
def test_a_sum_is_the_same_on_all_ranks(on_pool: Any) -> None:
    def main(pool: Pool) -> None:
        expected = 0.5 * sum(range(1, pool.size + 1))
        assert pool.run(sum_over_ranks, 0.5) == [[expected, expected]] * pool.size

    on_pool(main)


@pytest.mark.mpi(min_size=2)
def test_a_failure_names_its_rank_and_the_pool_goes_on(on_pool: Any) -> None:
    def main(pool: Pool) -> None:
        with pytest.raises(RemoteError, match="has no luck") as caught:
            pool.run(fail_on_last_rank)
        assert [record["rank"] for record in caught.value.records] == [pool.size - 1]
        assert pool.run(lambda world: world.rank) == list(range(pool.size))

    on_pool(main)
