"""All-to-all: which ranks a row goes to, and one host read a layer. What comes out is tested in test_expert."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.expert_all_to_all import AllToAll
from dist_infer.comm.expert_rows import ExpertRows
from dist_infer.comm.moe_chunks import plan_chunks
from tests.fake_collectives import run_group

EXPERT_SIZES = [2, 0, 1, 2]  # experts 0 1 | none | 2 | 3 4


def run_all_to_all(ids: list[list[list[int]]], limit: int | None = None) -> list[list[list[list[int]]]]:
    """By rank and call of the experts: the ids that they see."""
    plan = plan_chunks([len(own) for own in ids], limit)

    def main(world: Collectives) -> list[list[list[int]]]:
        own = torch.tensor(ids[world.rank], dtype=torch.int32).view(-1, 2)
        rows = ExpertRows(torch.rand(len(own), 3), own, torch.ones(own.shape))
        seen = []

        def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            seen.append(ids.tolist())
            return x

        results = torch.cat(AllToAll(world, EXPERT_SIZES, torch.device("cpu")).run(rows, experts, plan))
        # Each rank that a row went to sent it back once.
        owners = [{[0, 0, 2, 3, 3][expert] for expert in row if expert >= 0} for row in ids[world.rank]]
        torch.testing.assert_close(results, rows.x * torch.tensor([[len(ranks)] for ranks in owners]).view(-1, 1))
        return seen

    return run_group(4, main)


def test_a_row_goes_once_to_each_rank_with_one_of_its_experts() -> None:
    seen = run_all_to_all([[[0, 1], [0, 4]], [], [[2, -1]], [[-1, -1], [3, 2]]])
    assert seen == [
        [[[0, 1], [0, -1]]],
        [[]],
        [[[0, -1], [-1, 0]]],
        [[[-1, 1], [0, -1]]],
    ]


def test_chunks_and_ranks_that_have_run_out() -> None:
    seen = run_all_to_all([[[0, 2], [1, 4], [2, 3]], [[4, 0]], [], []], limit=2)
    assert [len(calls) for calls in seen] == [2] * 4
    assert seen[0] == [[[0, -1], [1, -1], [-1, 0]], []]
    assert seen[3] == [[[-1, 1], [1, -1]], [[-1, 0]]]


def test_host_reads_the_counts_once_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asks the device for nothing else that it would have to wait for."""
    reads: list[str] = []

    def count(name: str) -> None:
        plain = getattr(Tensor, name)

        def call(self: Tensor, *args: object, **options: object) -> object:
            reads.append(name)
            return plain(self, *args, **options)

        monkeypatch.setattr(Tensor, name, call)

    plan = plan_chunks([9], 2)
    ids = torch.arange(18, dtype=torch.int32).view(-1, 2) % 5
    rows = ExpertRows(torch.rand(9, 3), ids, torch.ones(9, 2))
    exchange = AllToAll(SingleCollectives(), [5], torch.device("cpu"))
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__", "__index__", "cpu", "unique", "masked_select"):
        count(name)
    exchange.run(rows, lambda x, ids, weights: x, plan)
    assert plan.num_chunks == 5 and reads == ["tolist"]
