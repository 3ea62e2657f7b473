"""All-reduce with what follows it: GATHER and LIBRARY between CPU ranks, all strategies between two GPUs.

Every rank makes the inputs of all ranks from one seed, so it can compute what it must get without asking.
"""

import math
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dist_infer.comm.all_reduce import MAX_ONE_SHOT_BYTES, FusedAllReduce, FusedOp, max_one_shot_bytes
from dist_infer.comm.collectives import Collectives, SingleCollectives, TorchCollectives, ordered_sum
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.strategy import Strategy, Table
from dist_infer.comm.wire import NcclWire
from dist_infer.errors import UsageError
from dist_infer.kernels import qk_norm as qk_norm_op
from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import rms_norm as rms_norm_op
from dist_infer.kernels.all_reduce import Reduced
from dist_infer.kernels.carriers import ExpertOutputs, QkNorm, Rotation
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.moe_finalize import LIBRARIES, moe_finalize
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.launch.world import World
from tests.comm.peer_ranks import needs_peers, opened_room, skip_without_peers

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
PEER_RANKS = (2, 4)
EPS = 1e-5
CPU = Target(device=torch.device("cpu"), dtype=torch.bfloat16)
SCALED = (QuantFormat.FP8, QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR)
HIDDEN = 2048


@pytest.fixture(scope="module")
def group(world: World) -> Collectives:
    """All ranks on one axis."""
    return world.communicators(Mesh.create(world=world.size, rank=world.rank)).world


def _parts(size: int, num_tokens: int, target: Target, seed: int, hidden: int = HIDDEN) -> list[Tensor]:
    """The tensor of each rank: large ones cancel, so that the order of the sum shows; zeros of both signs, NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, num_tokens, hidden, generator=generator)
    if size > 2:
        place = torch.rand(x.shape, generator=generator).argsort(dim=0)
        x = x.masked_fill(place == 0, 2.0**9).masked_fill(place == 1, -(2.0**9))
    x[..., 2:6] = -0.0
    if num_tokens > 2:
        x[0, 1, 7], x[size - 1, 1, 8] = math.inf, math.nan
    return list(x.to(target.dtype).to(target.device))


def _expected(parts: list[Tensor], fused_op: FusedOp, given: dict[str, Tensor | None], target: Target) -> Reduced:
    total = ordered_sum(parts)
    if fused_op is FusedOp.NONE:
        return Reduced(total=total, normed=None, quantized=())
    library = resolve("rms_norm", rms_norm_op.LIBRARIES, target).pick()
    weight = given["weight"]
    assert weight is not None
    if given["residual"] is not None:
        total = total + given["residual"]
    normed, _ = rms_norm_op.rms_norm(total, weight, EPS, library=library)
    quant_format = fused_op.value.quant_format
    if quant_format is None:
        return Reduced(total=total, normed=normed, quantized=())
    quantize = resolve("quantize", quantize_op.LIBRARIES, target).pick()
    quantized = quantize_op.quantize(normed, quant_format, given["scale"], library=quantize)
    return Reduced(total=total, normed=normed if fused_op.value.keeps_norm else None, quantized=(quantized,))


def _same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    equal = ours.view(integers) == theirs.view(integers)
    return bool((equal | (ours.float().isnan() & theirs.float().isnan())).all())


def check_op(
    reduce: FusedAllReduce,
    size: int,
    rank: int,
    num_tokens: int,
    fused_op: FusedOp,
    target: Target,
    hidden: int = HIDDEN,
) -> None:
    parts = _parts(size, num_tokens, target, seed=num_tokens, hidden=hidden)
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(num_tokens, hidden, generator=generator).to(target.dtype).to(target.device)
    weight = torch.randn(hidden, generator=generator).to(target.dtype).to(target.device)
    given = {
        "residual": residual if fused_op.value.has_residual else None,
        "weight": weight if fused_op.value.has_norm else None,
        "scale": torch.tensor([0.5], device=target.device) if fused_op.value.quant_format in SCALED else None,
    }
    ours = reduce(parts[rank], fused_op, eps=EPS, **given)
    theirs = _expected(parts, fused_op, given, target)
    assert _same(ours.total, theirs.total) and _same(ours.normed, theirs.normed)
    assert len(ours.quantized) == len(theirs.quantized)
    for mine, other in zip(ours.quantized, theirs.quantized, strict=True):
        assert _same(mine.data, other.data) and _same(mine.scales, other.scales)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("fused_op", FusedOp)
def test_gather_on_the_cpu(fused_op: FusedOp, group: Collectives) -> None:
    reduce = FusedAllReduce(group, CPU, strategy=Strategy.GATHER)
    most = 129 if fused_op in (FusedOp.NONE, FusedOp.RESIDUAL_RMS_NORM_QUANT_NVFP4) else 33
    for num_tokens in (0, 1, 33, 129):
        if num_tokens <= most:
            check_op(reduce, group.size, group.rank, num_tokens, fused_op, CPU)


@pytest.mark.ranks(1, 2, 4)
def test_outputs_of_experts_are_added_up_first(group: Collectives) -> None:
    reduce = FusedAllReduce(group, CPU, strategy=Strategy.GATHER)
    for num_tokens in (0, 1, 33, 129):
        generator = torch.Generator().manual_seed(num_tokens)
        weight = torch.randn(HIDDEN, generator=generator).bfloat16()
        residual = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        ranks = [
            ExpertOutputs(
                outputs=torch.randn(num_tokens * 4, HIDDEN, generator=generator).bfloat16(),
                ids=torch.randint(-1, 3, (num_tokens, 4), generator=generator, dtype=torch.int32),
                weights=torch.rand(num_tokens, 4, generator=generator),
                num_experts=3,
                shared=torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(),
            )
            for _ in range(group.size)
        ]
        given = {"residual": residual, "weight": weight}
        ours = reduce(ranks[group.rank], FusedOp.RESIDUAL_RMS_NORM, eps=EPS, **given)
        sums = [moe_finalize(x, library=LIBRARIES[-1]) for x in ranks]
        theirs = _expected(sums, FusedOp.RESIDUAL_RMS_NORM, {**given, "scale": None}, CPU)
        assert _same(ours.total, theirs.total) and _same(ours.normed, theirs.normed)


@pytest.mark.ranks(2)
def test_library_on_the_cpu(group: Collectives, world: World) -> None:
    """The order of a sum of two is the same."""
    gloo = world.communicators(Mesh.create(world=world.size, rank=world.rank), "gloo").world
    assert isinstance(gloo, TorchCollectives)
    library = gloo.wire.group  # type: ignore[attr-defined]
    reduce = FusedAllReduce(group, CPU, strategy=Strategy.LIBRARY, library_group=library)
    x = [torch.randn(5, 64, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(group.size)]
    weight = torch.ones(64).bfloat16()
    ours = reduce(x[group.rank], FusedOp.RMS_NORM, weight=weight, eps=EPS)
    assert reduce.strategy_for(x[0]) is Strategy.LIBRARY and ours.normed is not None
    assert _same(ours.total, ordered_sum(x))


ALONE = SingleCollectives()


def test_without_peer_memory_every_size_is_gathered() -> None:
    reduce = FusedAllReduce(ALONE, CPU)
    assert {reduce.strategy_for(torch.zeros(rows, 64).bfloat16()) for rows in (0, 1, 5000)} == {Strategy.GATHER}
    reduce.close()


@pytest.mark.parametrize("strategy", [Strategy.ONE_SHOT, Strategy.TWO_SHOT])
def test_a_strategy_that_needs_peer_memory_is_refused_without_it(strategy: Strategy) -> None:
    with pytest.raises(UsageError, match=f"{strategy.value} needs peer memory"):
        FusedAllReduce(ALONE, CPU, strategy=strategy)


@pytest.mark.parametrize(
    ("fused_op", "residual", "weight"),
    [
        (FusedOp.NONE, None, torch.ones(64).bfloat16()),
        (FusedOp.RMS_NORM, None, None),
        (FusedOp.RESIDUAL_RMS_NORM, None, torch.ones(64).bfloat16()),
        (FusedOp.RMS_NORM, torch.zeros(2, 64).bfloat16(), torch.ones(64).bfloat16()),
    ],
)
def test_an_op_gets_what_it_takes_and_no_more(
    fused_op: FusedOp, residual: Tensor | None, weight: Tensor | None
) -> None:
    with pytest.raises(ValueError, match=fused_op.name):
        FusedAllReduce(ALONE, CPU)(torch.zeros(2, 64).bfloat16(), fused_op, residual=residual, weight=weight)


def test_ops_have_names_of_their_own() -> None:
    """Two equal values would be one op under two names."""
    assert len(FusedOp) == 3 + 2 * len(QuantFormat) and {op.kind for op in FusedOp} == {"none", "norm", "quant"}


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_slots_of_one_shot_never_take_more_than_between_two_ranks(num_ranks: int) -> None:
    assert max_one_shot_bytes(num_ranks) >= 1 << 18
    assert 2 * (num_ranks - 1) * max_one_shot_bytes(num_ranks) <= 2 * MAX_ONE_SHOT_BYTES


# Between GPUs, or ranks that share one.


def _target(world: World) -> Target:
    return Target(device=world.device, dtype=torch.bfloat16)


@needs_peers
@pytest.mark.gpu
@pytest.mark.ranks(*PEER_RANKS, timeout=180)
@pytest.mark.parametrize("strategy", [Strategy.GATHER, Strategy.ONE_SHOT, Strategy.TWO_SHOT])
def test_strategies_give_the_same_bytes(strategy: Strategy, group: Collectives, world: World) -> None:
    """Sizes one after another, and twice above the largest, where GATHER takes over. All ops: tests/kernels."""
    skip_without_peers(world)
    ops = (FusedOp.NONE, FusedOp.RESIDUAL_RMS_NORM, FusedOp.RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4)
    with opened_room(group, world) as room:
        reduce = FusedAllReduce(group, _target(world), room=room, strategy=strategy)
        for fused_op in ops:
            for num_tokens in (1, 33, 0, 129, 2, 1000, 128, 31):
                check_op(reduce, world.size, world.rank, num_tokens, fused_op, _target(world), 7168)
        check_op(reduce, world.size, world.rank, 1001, FusedOp.RESIDUAL_RMS_NORM, _target(world))
        check_op(reduce, world.size, world.rank, 3, FusedOp.NONE, _target(world), 7176)


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=120)
def test_the_library_sums_two_ranks_alike(group: Collectives, world: World) -> None:
    with opened_room(group, world):
        assert isinstance(group, TorchCollectives) and isinstance(group.wire, NcclWire)
        library: dist.ProcessGroup = group.wire.group
        reduce = FusedAllReduce(group, _target(world), strategy=Strategy.LIBRARY, library_group=library)
        x = torch.full((3, 64), 1.5 + world.rank, device=world.device).bfloat16()
        assert (reduce(x).total == 4).all()


@needs_peers
@pytest.mark.gpu
@pytest.mark.ranks(*PEER_RANKS, timeout=120)
def test_auto_follows_the_table(group: Collectives, world: World) -> None:
    skip_without_peers(world)
    name = torch.cuda.get_device_name(world.device)
    table: Table = {
        (name, world.size, "norm", HIDDEN): ((4, Strategy.TWO_SHOT), (9, Strategy.GATHER), (20, Strategy.ONE_SHOT))
    }
    with opened_room(group, world) as room:
        reduce = FusedAllReduce(group, _target(world), room=room, table=table)
        chosen = {
            rows: reduce.strategy_for(torch.zeros(rows, HIDDEN, device=world.device).bfloat16(), FusedOp.RMS_NORM)
            for rows in (1, 9, 20, 1000)
        }
        assert (room.layout.one_shot_rows < 1000) == (world.size > 2)  # then two shots take over
        after = {20: Strategy.ONE_SHOT, 1000: Strategy.ONE_SHOT if world.size == 2 else Strategy.TWO_SHOT}
        assert chosen == {1: Strategy.TWO_SHOT, 9: Strategy.GATHER} | after
        for rows in (*chosen, 1001):
            check_op(reduce, world.size, world.rank, rows, FusedOp.RMS_NORM, _target(world))


@needs_peers
@pytest.mark.gpu
@pytest.mark.ranks(*PEER_RANKS, timeout=180)
@pytest.mark.parametrize("strategy", [Strategy.ONE_SHOT, Strategy.TWO_SHOT])
def test_ten_thousand_calls_with_late_ranks(strategy: Strategy, group: Collectives, world: World) -> None:
    """In graphs of several sizes and eager ones between, a rank's host or device now and then late."""
    skip_without_peers(world)
    device, rank = world.device, world.rank
    with opened_room(group, world) as room:
        reduce = FusedAllReduce(group, _target(world), room=room, strategy=strategy)
        sizes = (1, 64, 3, 200)
        parts = {rows: _parts(world.size, rows, _target(world), seed=rows) for rows in sizes}
        expected = {rows: ordered_sum(parts[rows]) for rows in sizes}
        wrong = torch.zeros((), dtype=torch.int64, device=device)

        def call(rows: int) -> None:
            total = reduce(parts[rows][rank]).total
            wrong.add_(((total != expected[rows]) & ~(total.isnan() & expected[rows].isnan())).sum())

        def graph_of(rows: int) -> torch.cuda.CUDAGraph:
            call(rows)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(16):
                    call(rows)
            return graph

        graphs = {rows: graph_of(rows) for rows in sizes}
        for turn in range(600):
            if turn % 100 == 25 * rank:
                time.sleep(0.002)
            if turn % 100 == 12 + 25 * rank:
                torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            graphs[sizes[turn * 7 // 3 % 4]].replay()
            call(sizes[turn % 4])
        assert wrong.item() == 0


@needs_peers
@pytest.mark.gpu
@pytest.mark.ranks(*PEER_RANKS, timeout=120)
@pytest.mark.parametrize("strategy", [Strategy.ONE_SHOT, Strategy.TWO_SHOT])
def test_outputs_of_experts_through_peer_memory(strategy: Strategy, group: Collectives, world: World) -> None:
    skip_without_peers(world)
    device = world.device
    with opened_room(group, world) as room:
        ours, separate = (
            FusedAllReduce(group, _target(world), room=room, strategy=way) for way in (strategy, Strategy.GATHER)
        )
        for num_tokens in (1, 33, 0, 300):
            generator = torch.Generator(device).manual_seed(world.rank)
            x = ExpertOutputs(
                outputs=torch.randn(num_tokens * 8, HIDDEN, device=device, generator=generator).bfloat16(),
                ids=torch.randint(-1, 5, (num_tokens, 8), device=device, generator=generator, dtype=torch.int32),
                weights=torch.rand(num_tokens, 8, device=device, generator=generator),
                num_experts=4,
            )
            totals = [reduce(x).total for reduce in (ours, separate)]
            assert _same(*totals)


@needs_peers
@pytest.mark.gpu
@pytest.mark.ranks(*PEER_RANKS, timeout=120)
def test_heads_are_normed_through_peer_memory(group: Collectives, world: World) -> None:
    """As by separate ops, between sums of whole rows; more tokens than there is room for are not taken."""
    skip_without_peers(world)
    device = world.device
    with opened_room(group, world, max_tokens=300) as room:
        reduce = FusedAllReduce(group, _target(world), room=room)
        assert not reduce.takes_heads(torch.zeros(301, 8, 64, device=device).bfloat16())
        for num_tokens in (1, 33, 0, 300, 2):
            generator = torch.Generator(device).manual_seed(world.rank)
            qkv = torch.randn(num_tokens, 8, 64, device=device, generator=generator).bfloat16()
            weights = [torch.randn(heads * 64, device=device, generator=generator).bfloat16() for heads in (4, 2)]
            norm = QkNorm(
                q_weight=weights[0],
                k_weight=weights[1],
                num_q_channels=world.size * 256,
                num_k_channels=world.size * 128,
                eps=EPS,
                counts_keys=(True,),
            )
            angles = torch.rand(num_tokens, 16, device=device, generator=generator)
            caches = [torch.zeros(300, 2, 64, device=device).bfloat16() for _ in range(4)]
            slots = torch.arange(num_tokens, device=device)
            rotation = Rotation(
                cos=angles.cos(), sin=angles.sin(), slots=slots, k_cache=caches[0], v_cache=caches[1], interleaved=False
            )
            ours = reduce.norm_rotary(qkv, norm, rotation)
            squares = qk_norm_op.head_squares(qkv, 2, counts_keys=True, library=qk_norm_op.SQUARES_LIBRARIES[0])
            apart = replace(rotation, k_cache=caches[2], v_cache=caches[3])
            theirs = qk_norm_op.norm_rotary(
                qkv, group.all_reduce(squares), norm, apart, library=qk_norm_op.NORM_ROTARY_LIBRARIES[0]
            )
            assert _same(ours, theirs) and _same(caches[0], caches[2]) and _same(caches[1], caches[3])
            x = torch.full((num_tokens, HIDDEN), 1.5, device=device).bfloat16()
            assert (reduce(x).total == 1.5 * world.size).all()
