"""Rows to the experts and back: every layout against the formula in float64.

Most tests run the ranks as threads of one process; the last ones run real ranks, with bytes counted on the wire.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from dist_infer.comm import expert
from dist_infer.comm.bootstrap import open_process_groups
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert import ExpertExchange, open_expert_exchange
from dist_infer.comm.expert_rows import Experts
from dist_infer.comm.mesh import Mesh, split_range, split_sizes
from dist_infer.comm.moe_chunks import ChunkPlan
from dist_infer.errors import PeerFailedError
from dist_infer.kernels.moe_experts import LIBRARIES, moe_experts
from dist_infer.launch.world import World
from tests.dense_experts import DenseExperts
from tests.fake_collectives import FakeCollectives, run_group

CPU = torch.device("cpu")
WIDTH, INNER, TOP_K = 6, 5, 2
LIMITS = [1, 7, 100, None]


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh and the tokens of its groups; a group without tokens runs a dummy."""

    world: int
    dp: int
    ep: int
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"world {self.world} dp {self.dp} ep {self.ep} tokens {'-'.join(map(str, self.tokens))}"

    def mesh(self, rank: int) -> Mesh:
        return Mesh.create(world=self.world, rank=rank, dp=self.dp, ep=self.ep)

    @property
    def rank_tokens(self) -> list[int]:
        return [tokens for tokens in self.tokens for _ in range(self.world // self.dp)]


LAYOUTS = [
    Layout(1, 1, 1, (9,)),
    Layout(2, 1, 2, (9,)),
    Layout(2, 1, 1, (1,)),
    Layout(3, 1, 3, (65,)),
    Layout(4, 1, 2, (63,)),
    Layout(2, 2, 2, (9, 4)),
    Layout(2, 2, 2, (0, 63)),
    Layout(2, 2, 1, (5, 0)),
    Layout(3, 3, 3, (1, 0, 29)),
    Layout(4, 4, 4, (0, 29, 1, 45)),
    Layout(4, 4, 2, (7, 0, 12, 1)),
    Layout(4, 2, 4, (3, 65)),
    Layout(4, 2, 2, (1, 8)),
    Layout(4, 2, 1, (0, 10)),
]

SELECTIVE = [layout for layout in LAYOUTS if layout.dp > 1 and layout.ep == layout.world]


@dataclass(frozen=True, slots=True)
class Case:
    """The rows of every rank with their routing, and what must come back."""

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    expected: list[Tensor]


def make_case(layout: Layout, dense: DenseExperts, *, top_k: int = TOP_K, seed: int = 1) -> Case:
    """Rows as the layout deals them: all on every rank with one group, else a slice of the group's; NaN in dummies."""
    generator = torch.Generator().manual_seed(seed)
    tp = layout.world // layout.dp
    case = Case([], [], [], [])
    for tokens in layout.tokens:
        num_rows = max(1, tokens)
        x = torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)
        ids = torch.rand(num_rows, len(dense.down), generator=generator).argsort(1)[:, :top_k].int()
        weights = torch.rand(num_rows, top_k, generator=generator, dtype=torch.float64)
        expected = dense(x, ids, weights)
        if tokens == 0:
            x.fill_(torch.nan)
            weights.fill_(torch.nan)
            expected.zero_()
        for part, whole in ((case.x, x), (case.ids, ids), (case.weights, weights), (case.expected, expected)):
            part += [whole] * tp if layout.dp == 1 else torch.split(whole, split_sizes(num_rows, tp))
    return case


def held_experts(mesh: Mesh, dense: DenseExperts) -> Experts:
    """The experts and channels of a rank."""
    held = split_range(len(dense.down), mesh.ep, mesh.ep_rank)
    gate_up, down = dense.part(held, split_range(dense.down.shape[2], mesh.moe_tp, mesh.moe_tp_rank))
    return lambda x, ids, weights: moe_experts(x, ids, weights, gate_up.to(x), down.to(x), library=LIBRARIES[-1])


def open_exchange(layout: Layout, world: Collectives, *, num_experts: int = 5, top_k: int = TOP_K) -> ExpertExchange:
    return open_expert_exchange(layout.mesh(world.rank), world, CPU, num_experts=num_experts, top_k=top_k)


def run_layout(
    layout: Layout,
    world: Collectives,
    dense: DenseExperts,
    case: Case,
    limit: int | None,
    *,
    eager_prefill: bool = False,
    change_plan: Callable[[ChunkPlan, int], ChunkPlan] = lambda plan, rank: plan,
) -> Tensor:
    """What a rank gets."""
    exchange = open_exchange(layout, world, num_experts=len(dense.down), top_k=case.ids[0].shape[1])
    plan = change_plan(exchange.plan(layout.rank_tokens, limit, eager_prefill=eager_prefill), world.rank)
    experts = held_experts(layout.mesh(world.rank), dense)
    rank = world.rank
    return exchange.run(case.x[rank], case.ids[rank], case.weights[rank], experts, plan)


@pytest.fixture
def prefer_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for few rows and many experts a row."""
    monkeypatch.setattr(expert, "_MIN_SAVING", 0.0)
    monkeypatch.setattr(expert, "_MIN_SELECTIVE_ROWS", 0)


def check_layout(layout: Layout, limit: int | None, *, num_experts: int = 5, eager_prefill: bool = False) -> None:
    dense = DenseExperts.random(num_experts, INNER, WIDTH)
    case = make_case(layout, dense, top_k=min(TOP_K, num_experts))

    def main(world: Collectives) -> Tensor:
        return run_layout(layout, world, dense, case, limit, eager_prefill=eager_prefill)

    results = run_group(layout.world, main)
    for ours, truth in zip(results, case.expected, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    if layout.dp == 1:
        assert all(torch.equal(ours, results[0]) for ours in results), "ranks that hold the same rows, other bits"


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_against_the_formula(layout: Layout, limit: int | None) -> None:
    check_layout(layout, limit)


@pytest.mark.usefixtures("prefer_all_to_all")
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("layout", SELECTIVE, ids=str)
def test_all_to_all_against_the_formula(layout: Layout, limit: int | None) -> None:
    check_layout(layout, limit, eager_prefill=True)


@pytest.mark.usefixtures("prefer_all_to_all")
@pytest.mark.parametrize("eager_prefill", [False, True])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_ranks_without_experts(num_experts: int, eager_prefill: bool) -> None:
    for limit in (None, 3):
        check_layout(Layout(4, 4, 4, (5, 0, 1, 9)), limit, num_experts=num_experts, eager_prefill=eager_prefill)


def _rounded(case: Case, dtype: torch.dtype) -> Case:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return Case([x.to(dtype) for x in case.x], case.ids, [w.to(wide) for w in case.weights], case.expected)


@pytest.mark.usefixtures("prefer_all_to_all")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [7, None])
def test_all_to_all_gives_the_bytes_of_gather_and_scatter(dtype: torch.dtype, limit: int | None) -> None:
    for layout in SELECTIVE:
        dense = DenseExperts.random(5, INNER, WIDTH)
        case = _rounded(make_case(layout, dense, top_k=4), dtype)

        def main(world: Collectives, layout: Layout = layout, case: Case = case, dense: DenseExperts = dense) -> bool:
            one, other = (run_layout(layout, world, dense, case, limit, eager_prefill=eager) for eager in (False, True))
            calls = {name for name, _ in world.calls} if isinstance(world, FakeCollectives) else set()
            assert {"all_gather", "reduce_scatter", "all_to_all"} <= calls, "not both ways were taken"
            assert one.dtype == dtype
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

        assert run_group(layout.world, main) == [True] * layout.world


def _calls(layout: Layout, limit: int | None, *, eager_prefill: bool = False) -> list[list[str]]:
    """The collectives of every rank."""
    dense = DenseExperts.random(5, INNER, WIDTH)
    case = make_case(layout, dense)

    def main(world: Collectives) -> list[str]:
        run_layout(layout, world, dense, case, limit, eager_prefill=eager_prefill)
        assert isinstance(world, FakeCollectives)
        return [name for name, _ in world.calls if name != "all_to_all sizes"]

    return run_group(layout.world, main)


@pytest.mark.usefixtures("prefer_all_to_all")
def test_collectives_of_each_layout_are_the_same_on_all_ranks() -> None:
    assert _calls(Layout(4, 1, 2, (63,)), 7) == [["all_reduce"]] * 4
    assert _calls(Layout(4, 2, 2, (30, 4)), 17) == [["all_gather", "reduce_scatter"] * 2] * 4
    assert _calls(Layout(3, 3, 3, (300, 0, 4)), 152, eager_prefill=True) == [["all_gather"] + ["all_to_all"] * 4] * 3


def test_all_to_all_only_for_eager_prefill_that_is_worth_it() -> None:
    def selective(layout: Layout, *, top_k: int, eager_prefill: bool = True) -> bool:
        def main(world: Collectives) -> bool:
            exchange = open_exchange(layout, world, top_k=top_k)
            return exchange.plan(layout.rank_tokens, 100, eager_prefill=eager_prefill).selective

        answers = set(run_group(layout.world, main))
        assert len(answers) == 1, "the ranks disagree"
        return answers.pop()

    assert selective(Layout(4, 4, 4, (400, 0, 200, 1)), top_k=2)
    assert not selective(Layout(4, 4, 4, (400, 0, 200, 1)), top_k=2, eager_prefill=False)
    assert not selective(Layout(4, 4, 4, (200, 0, 10, 1)), top_k=2), "too few rows"
    assert not selective(Layout(2, 2, 2, (400, 2000)), top_k=1), "half is not enough"
    assert not selective(Layout(4, 4, 4, (400, 0, 200, 1)), top_k=5), "nearly every row goes everywhere"
    assert not selective(Layout(4, 4, 2, (400, 0, 200, 1)), top_k=2), "experts are cut"
    assert not selective(Layout(4, 1, 4, (600,)), top_k=2), "all ranks hold all rows"


@dataclass(frozen=True, slots=True)
class PatchOwnPlan(ChunkPlan):
    """The fault that the chunk plan exists to prevent: a rank patches its own entry only."""

    rank: int = 0

    def sizes(self, chunk: int) -> tuple[int, ...]:
        real = [q + (chunk < r) for q, r in zip(self.quotients, self.remainders, strict=True)]
        real[self.rank] = real[self.rank] or 1
        return tuple(real)


def patch_own(plan: ChunkPlan, rank: int) -> ChunkPlan:
    return PatchOwnPlan(plan.num_chunks, plan.quotients, plan.remainders, rank=rank)


def test_planted_fault_each_rank_patches_its_own_entry_only() -> None:
    layout = Layout(2, 2, 2, (9, 4))
    dense = DenseExperts.random(5, INNER, WIDTH)
    case = make_case(layout, dense)
    run_group(2, lambda world: run_layout(layout, world, dense, case, 2))
    with pytest.raises((AssertionError, ValueError)):
        run_group(2, lambda world: run_layout(layout, world, dense, case, 2, change_plan=patch_own))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_padding_is_neither_sent_nor_computed(num_tokens: int) -> None:
    """NaN behind the real rows, and experts that would choke on it."""
    for layout in (Layout(2, 1, 2, (4,)), Layout(2, 2, 2, (4, 4)), Layout(2, 2, 1, (4, 4))):
        dense = DenseExperts.random(5, INNER, WIDTH)
        case = make_case(layout, dense)
        real = Layout(2, layout.dp, layout.ep, (num_tokens,) * layout.dp)

        def main(world: Collectives, case: Case = case, real: Layout = real, dense: DenseExperts = dense) -> Tensor:
            x, weights = case.x[world.rank].clone(), case.weights[world.rank].clone()
            x[num_tokens:], weights[num_tokens:] = torch.nan, torch.nan
            own = held_experts(real.mesh(world.rank), dense)

            def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
                assert not x.isnan().any() and not weights.isnan().any()
                return own(x, ids, weights)

            exchange = open_exchange(real, world)
            plan = exchange.plan(real.rank_tokens, 2)
            return exchange.run(x, case.ids[world.rank], weights, experts, plan)

        for rank, ours in enumerate(run_group(2, main)):
            torch.testing.assert_close(ours[:num_tokens], case.expected[rank][:num_tokens], rtol=1e-12, atol=1e-12)
            assert ours[num_tokens:].tolist() == [[0.0] * WIDTH] * (4 - num_tokens)


def test_bad_calls_are_refused() -> None:
    layout = Layout(1, 1, 1, (4,))

    def main(world: Collectives) -> None:
        with pytest.raises(ValueError, match="rank 0 of 1 is not rank 1 of 2"):
            open_expert_exchange(Mesh.create(world=2, rank=1), world, CPU, num_experts=5, top_k=2)
        exchange = open_exchange(layout, world)
        with pytest.raises(ValueError, match=r"1 ranks of one group can't have \[4, 4\] tokens"):
            exchange.plan([4, 4], None)
        plan = exchange.plan([4], None)
        x, ids, weights = torch.zeros(4, WIDTH), torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
        with pytest.raises(ValueError, match="gives this rank 4 rows, but x has 3"):
            exchange.run(x[:3], ids[:3], weights[:3], lambda x, ids, weights: x, plan)
        for bad in ((x[:3], ids, weights), (x, ids[:, :1], weights), (x[0], ids, weights)):
            with pytest.raises(ValueError, match=r"are not \[R, D\], \[R, K\] and \[R, K\]"):
                exchange.run(*bad, lambda x, ids, weights: x, plan)

    run_group(1, main)


def test_tokens_that_no_layout_can_have_are_refused() -> None:
    def main(world: Collectives) -> None:
        exchange = open_exchange(Layout(4, 2, 4, (1, 1)), world)
        for tokens in ([3, 2, 1, 1], [3, 3, 1], [3, 3, 1, 1, 1]):
            with pytest.raises(ValueError, match="2 groups of 2 ranks can't have"):
                exchange.plan(tokens, None)

    run_group(4, main)


def test_plan_for_all_to_all_is_refused_where_experts_are_cut() -> None:
    layout = Layout(2, 2, 1, (3, 3))
    dense = DenseExperts.random(5, INNER, WIDTH)
    case = make_case(layout, dense)
    with pytest.raises(ValueError, match="this layout has no all-to-all, but the plan asks for it"):
        run_group(
            2,
            lambda world: run_layout(
                layout, world, dense, case, None, change_plan=lambda plan, rank: replace(plan, selective=True)
            ),
        )


# Real ranks.


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("prefer_all_to_all")
def test_real_ranks_against_the_formula(world: World) -> None:
    dense = DenseExperts.random(5, INNER, WIDTH)
    for layout in (layout for layout in LAYOUTS if layout.world == world.size):
        group = world.communicators(layout.mesh(world.rank)).world
        for seed, (limit, eager) in enumerate(product([7, None], [False, True])):
            case = make_case(layout, dense, seed=seed)
            ours = run_layout(layout, group, dense, case, limit, eager_prefill=eager)
            torch.testing.assert_close(ours, case.expected[world.rank], rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("prefer_all_to_all")
def test_all_to_all_sends_only_what_is_needed(world: World) -> None:
    """The bytes of the wire against what the routing asks for, and below those of gathering."""
    size, rank, others = world.size, world.rank, world.size - 1
    layout = Layout(size, size, size, tuple([200, 0, 77, 31][:size]))
    dense = DenseExperts.random(5, INNER, WIDTH)
    case = make_case(layout, dense)
    group = world.communicators(layout.mesh(rank)).world
    owners = [owner for owner, held in enumerate(split_sizes(5, size)) for _ in range(held)]
    # Rows from each rank to each: a row goes once to each rank that holds one of its experts.
    num_rows = [
        [sum(target in {owners[e] for e in row} for row in ids[:tokens].tolist()) for target in range(size)]
        for ids, tokens in zip(case.ids, layout.tokens, strict=True)
    ]
    row_bytes = WIDTH * 8 + TOP_K * (8 + 4)
    for limit in (None, 50):
        counts: dict[bool, int] = {}
        for eager in (False, True):
            before = dict(group.wire_bytes)
            run_layout(layout, group, dense, case, limit, eager_prefill=eager)
            sent = {name: count - before[name] for name, count in group.wire_bytes.items() if count > before[name]}
            counts[eager] = sum(sent.values())
            if eager:
                out = sum(num_rows[rank]) - num_rows[rank][rank]
                back = sum(source[rank] for source in num_rows) - num_rows[rank][rank]
                num_chunks = open_exchange(layout, group).plan(layout.rank_tokens, limit).num_chunks
                assert sent.get("all_to_all", 0) == out * row_bytes + back * WIDTH * 8
                assert sent["all_gather"] == others * num_chunks * size * 8
        assert counts[True] < counts[False]


@pytest.mark.ranks(2)
def test_planted_fault_stops_real_ranks(world: World) -> None:
    """Vectors that differ leave a rank waiting, until its time-out tells. Patched alike, the same rows pass."""
    layout = Layout(2, 2, 2, (9, 2))
    mesh = layout.mesh(world.rank)
    dense = DenseExperts.random(5, INNER, WIDTH)
    case = make_case(layout, dense)
    own = open_process_groups(mesh=mesh, store=world.store, backend="gloo", device=CPU, timeout_s=1.5)
    run_layout(layout, own.world, dense, case, 2)
    with pytest.raises((PeerFailedError, ValueError)):
        run_layout(layout, own.world, dense, case, 2, change_plan=patch_own)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
@pytest.mark.ranks(2)
@pytest.mark.usefixtures("prefer_all_to_all")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_between_gpus(world: World, dtype: torch.dtype) -> None:
    """By NCCL, where scatters overlap the next chunk: the formula, several times over, and by all-to-all."""
    group = world.communicators(Mesh.create(world=2, rank=world.rank)).world
    for layout, limit in product((layout for layout in LAYOUTS if layout.world == 2), LIMITS):
        dense = DenseExperts.random(5, INNER, WIDTH)
        case = _rounded(make_case(layout, dense), dtype)
        x, ids, weights = (part[world.rank].to(world.device) for part in (case.x, case.ids, case.weights))
        exchange = open_expert_exchange(layout.mesh(world.rank), group, world.device, num_experts=5, top_k=TOP_K)
        experts = held_experts(layout.mesh(world.rank), dense)
        for eager in (False, True):
            plan = exchange.plan(layout.rank_tokens, limit, eager_prefill=eager)
            for _ in range(6):
                ours = exchange.run(x, ids, weights, experts, plan).cpu()
                tolerance = 1e-12 if dtype == torch.float64 else 0.05
                torch.testing.assert_close(ours.double(), case.expected[world.rank], rtol=tolerance, atol=tolerance)
