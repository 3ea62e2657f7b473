"""Rows to the experts and back: every layout against the formula in float64, ranks as threads of one process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert import ExpertExchange, open_expert_exchange
from dist_infer.comm.mesh import Mesh, split_range, split_sizes
from dist_infer.kernels.moe_experts import LIBRARIES, moe_experts
from tests.dense_experts import DenseExperts
from tests.fake_collectives import run_group

CPU = torch.device("cpu")
WIDTH, INNER, TOP_K = 6, 5, 2


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and the tokens of its groups."""

    world: int
    dp: int
    ep: int
    tokens: tuple[int, ...]

    def mesh(self, rank: int) -> Mesh:
        return Mesh.create(world=self.world, rank=rank, dp=self.dp, ep=self.ep)

    @property
    def rank_tokens(self) -> list[int]:
        return [tokens for tokens in self.tokens for _ in range(self.world // self.dp)]


LAYOUTS = [
    Layout(1, 1, 1, (9,)),
    Layout(2, 1, 2, (9,)),
    Layout(2, 1, 1, (1,)),
    Layout(3, 1, 3, (129,)),
    Layout(4, 1, 2, (63,)),
    Layout(2, 2, 2, (9, 4)),
    Layout(2, 2, 2, (0, 300)),
    Layout(2, 2, 1, (5, 0)),
    Layout(3, 3, 3, (1, 0, 29)),
    Layout(4, 4, 4, (0, 129, 1, 200)),
    Layout(4, 4, 2, (7, 0, 12, 1)),
    Layout(4, 2, 4, (3, 130)),
    Layout(4, 2, 2, (1, 8)),
    Layout(4, 2, 1, (0, 10)),
]


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of every rank with their routing, and what must come back."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    expected: list[Tensor]


def make_case(layout: Layout, dense: DenseExperts, *, top_k: int = TOP_K, seed: int = 1) -> Case:
    """Rows as the layout deals them: all on every rank with one group, else a slice of the group's."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = len(dense.down)
    case = Case([], [], [], [])
    for tokens in layout.tokens:
        x = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
        ids = torch.rand(tokens, num_experts, generator=generator).argsort(1)[:, :top_k].int()
        weights = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64)
        expected = dense(x, ids, weights)
        tp = layout.world // layout.dp
        sizes = split_sizes(tokens, tp)
        for part, whole in ((case.x, x), (case.ids, ids), (case.weights, weights), (case.expected, expected)):
            part += [whole] * tp if layout.dp == 1 else torch.split(whole, sizes)
    return case


def held_experts(mesh: Mesh, dense: DenseExperts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts and channels of a rank."""
    held = split_range(len(dense.down), mesh.ep, mesh.ep_rank)
    gate_up, down = dense.part(held, split_range(dense.down.shape[2], mesh.moe_tp, mesh.moe_tp_rank))
    return lambda x, ids, weights: moe_experts(x, ids, weights, gate_up.to(x), down.to(x), library=LIBRARIES[0])


def exchange_of(layout: Layout, world: Collectives, *, num_experts: int, top_k: int = TOP_K) -> ExpertExchange:
    return open_expert_exchange(layout.mesh(world.rank), world, CPU, num_experts=num_experts, top_k=top_k)


@pytest.mark.parametrize("limit", [1, 7, 100, None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_against_the_formula(layout: Layout, limit: int | None) -> None:
    dense = DenseExperts.random(5, INNER, WIDTH)
    case = make_case(layout, dense)

    def main(world: Collectives) -> Tensor:
        exchange = exchange_of(layout, world, num_experts=5)
        plan = exchange.plan(layout.rank_tokens, limit)
        rank = world.rank
        return exchange.run(
            case.x[rank], case.ids[rank], case.weights[rank], held_experts(layout.mesh(rank), dense), plan
        )

    for ours, truth in zip(run_group(layout.world, main), case.expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
