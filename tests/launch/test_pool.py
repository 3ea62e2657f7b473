"""The rank pool: values by rank, failures as records, and no rank left waiting for a task that can't be sent."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dist_infer.errors import UsageError
from dist_infer.launch import channel
from dist_infer.launch.failure import RemoteError
from dist_infer.launch.pool import Pool, run_pool
from dist_infer.launch.world import World


def on_rank_0(world: World, main: Callable[[Pool], object]) -> None:
    """Run a test's body as the pool's program. A body that fails fails the test on rank 0, which ends the launch."""
    run_pool(world, main)


def own_rank(world: World, base: int = 0, *, factor: int = 1) -> int:
    return base + factor * world.rank


@pytest.mark.ranks(1, 2, 4)
def test_values_come_by_rank(world: World) -> None:
    def main(pool: Pool) -> None:
        assert pool.size == world.size
        for repeat in range(6):
            assert pool.run(own_rank, repeat, factor=10) == [repeat + 10 * rank for rank in range(pool.size)]
        assert pool.run(lambda each: each.local_rank) == list(range(pool.size))

    on_rank_0(world, main)


@pytest.mark.ranks(1, 2, 4)
def test_a_late_rank_is_waited_for(world: World) -> None:
    def late(world: World, late_rank: int) -> int:
        if world.rank == late_rank:
            time.sleep(0.1)
        return world.rank

    def main(pool: Pool) -> None:
        for late_rank in range(pool.size):
            assert pool.run(late, late_rank) == list(range(pool.size))

    on_rank_0(world, main)


@pytest.mark.ranks(2)
def test_tasks_and_values_longer_than_a_chunk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CHUNK_BYTES", 10_000)
    data = np.arange(50_000)

    def main(pool: Pool) -> None:
        for value in pool.run(lambda world, given: given + world.rank, data):
            assert value[0] in (0, 1) and len(value) == len(data)

    on_rank_0(world, main)


@pytest.mark.ranks(1, 2)
def test_collectives_work_inside_a_task(world: World) -> None:
    def exchange(world: World) -> list[int]:
        return world.all_min([world.rank + 5, -world.rank])

    def main(pool: Pool) -> None:
        assert pool.run(exchange) == [[5, 1 - pool.size]] * pool.size

    on_rank_0(world, main)


@pytest.mark.ranks(1, 2, 4)
def test_failures_are_records_and_the_pool_goes_on(world: World) -> None:
    def odd_ones_break(world: World) -> int:
        if world.rank % 2 or world.size == 1:
            raise KeyError(f"on rank {world.rank}")
        return world.rank

    def main(pool: Pool) -> None:
        for _ in range(6):
            with pytest.raises(RemoteError) as caught:
                pool.run(odd_ones_break)
            broken = [record["rank"] for record in caught.value.records]
            assert broken == ([0] if pool.size == 1 else list(range(1, pool.size, 2)))
            record = caught.value.records[0]
            assert record["type"] == "KeyError" and "odd_ones_break" in str(record["traceback"])
            assert pool.run(own_rank) == list(range(pool.size))

    on_rank_0(world, main)


class NastyError(Exception):
    """Neither its text nor its pickle can be had."""

    def __init__(self, first: int, *, lock: Any) -> None:
        super().__init__(lock)

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.ranks(1, 2)
def test_an_error_that_pickles_badly_is_still_reported(world: World) -> None:
    def nasty(world: World) -> None:
        raise NastyError(1, lock=threading.Lock())

    def main(pool: Pool) -> None:
        with pytest.raises(RemoteError) as caught:
            pool.run(nasty)
        assert [record["type"] for record in caught.value.records] == ["NastyError"] * pool.size

    on_rank_0(world, main)


@pytest.mark.ranks(1, 2)
def test_a_value_that_does_not_pickle_is_a_failure_of_its_rank(world: World) -> None:
    def main(pool: Pool) -> None:
        with pytest.raises(RemoteError, match="lock"):
            pool.run(lambda world: threading.Lock())
        assert pool.run(own_rank) == list(range(pool.size))

    on_rank_0(world, main)


def _explode() -> None:
    raise ImportError("only where it is unpickled")


class ExplodesOnLoad:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _explode, ()


@pytest.mark.ranks(1, 2)
def test_a_task_or_value_that_does_not_unpickle_is_a_failure(world: World) -> None:
    def main(pool: Pool) -> None:
        with pytest.raises(RemoteError) as caught:
            pool.run(lambda world, thing: None, ExplodesOnLoad())
        assert len(caught.value.records) == pool.size
        with pytest.raises(RemoteError, match="can't unpickle"):
            pool.run(lambda world: ExplodesOnLoad())
        assert pool.run(own_rank) == list(range(pool.size))

    on_rank_0(world, main)


@pytest.mark.ranks(1, 2)
def test_what_can_not_be_pickled_is_refused_before_anything_is_sent(world: World) -> None:
    def uses_ops(world: World) -> object:
        return torch.ops.aten.add

    def main(pool: Pool) -> None:
        with pytest.raises(UsageError, match=r"uses_ops can't be sent .*import torch inside the function"):
            pool.run(uses_ops)
        lock = threading.Lock()
        with pytest.raises(UsageError, match="can't be sent"):
            pool.run(lambda world: lock.locked())
        with pytest.raises(UsageError, match="arguments of own_rank can't be sent"):
            pool.run(own_rank, lock)  # type: ignore[arg-type]
        assert pool.run(own_rank) == list(range(pool.size))

    on_rank_0(world, main)


def uses_ops_inside(world: World) -> str:
    """The cure that the error names."""
    import torch

    return str(torch.ops.aten.add)


@pytest.mark.ranks(2)
def test_the_cure_for_torch_ops_works(world: World) -> None:
    on_rank_0(world, lambda pool: pool.run(uses_ops_inside))


@pytest.mark.ranks(2)
def test_idle_ranks_sleep(world: World) -> None:
    """CPU seconds of the process, not wall time: a rank that spins would use all that it gets."""

    def cpu_s(world: World) -> float:
        usage = os.times()
        return usage.user + usage.system

    def main(pool: Pool) -> None:
        before = pool.run(cpu_s)[1]
        time.sleep(2.0)
        assert pool.run(cpu_s)[1] - before < 0.5

    on_rank_0(world, main)


@pytest.mark.ranks(1)
def test_a_closed_pool_refuses(world: World) -> None:
    kept: list[Pool] = []
    run_pool(world, kept.append)
    with pytest.raises(UsageError, match="closed"):
        kept[0].run(own_rank)
