"""The order of gathering, computing and scattering. What comes out is tested in test_expert."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert_gather import GatherScatter
from dist_infer.comm.expert_rows import ExpertRows
from dist_infer.comm.lane import Lane, Pending
from dist_infer.comm.moe_chunks import ChunkPlan, plan_chunks
from tests.fake_collectives import FakeCollectives, run_group

SHORT = {"all_gather": "G", "reduce_scatter": "S"}


def order_of(plan: ChunkPlan) -> list[str]:
    """What each rank does, as one string."""

    def main(world: Collectives) -> str:
        assert isinstance(world, FakeCollectives)
        num_rows = plan.rows(world.rank)
        rows = ExpertRows(torch.rand(num_rows, 3), torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, 1))

        def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            world.calls.append(("E", tuple(x.shape)))
            return x.masked_fill(ids < 0, 0)

        results = GatherScatter(world, range(world.rank, 1), torch.device("cpu")).run(rows, experts, plan)
        torch.testing.assert_close(torch.cat(results), rows.x)
        return "".join(SHORT.get(name, name) for name, _ in world.calls)

    return run_group(2, main)


def test_chunk_after_chunk_where_the_host_waits() -> None:
    assert order_of(plan_chunks([9, 2], 3)) == ["GES" * 4] * 2
    assert order_of(plan_chunks([1, 2], None)) == ["GES"] * 2


def test_next_gather_before_this_scatter_where_they_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the scatter of a chunk is under way while the experts work on the next, in one order on all ranks."""
    monkeypatch.setattr(Lane, "overlaps", True)
    assert order_of(plan_chunks([9, 2], 3)) == ["G" + "GES" * 3 + "ES"] * 2
    assert order_of(plan_chunks([1, 2], None)) == ["GES"] * 2


def test_what_is_dropped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a stand-in's part would be given to others while the peers still get it."""
    plain_start, plain_wait = Lane.start, Pending.wait
    started: list[Pending] = []
    waited: list[Pending] = []

    def start(lane: Lane, work: Callable[[], Tensor], *inputs: Tensor) -> Pending:
        started.append(plain_start(lane, work, *inputs))
        return started[-1]

    def wait(pending: Pending) -> Tensor:
        waited.append(pending)
        return plain_wait(pending)

    monkeypatch.setattr(Lane, "start", start)
    monkeypatch.setattr(Pending, "wait", wait)
    order_of(plan_chunks([9, 2], 3))
    assert {id(pending) for pending in waited} == {id(pending) for pending in started}
    assert len(started) == 2 * 2 * 4
