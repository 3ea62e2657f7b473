"""The experts that a rank holds."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.moe_experts import (
    LIBRARIES,
    OUTPUTS_LIBRARIES,
    MoeExpertsFunction,
    expert_outputs,
    moe_experts,
)
from dist_infer.kernels.moe_finalize import LIBRARIES as FINALIZE_LIBRARIES
from dist_infer.kernels.moe_finalize import moe_finalize
from tests.dense_experts import DenseExperts
from tests.kernels.aot import compile_ahead
from tests.kernels.triton_interpreter import TRITON_DEVICES
from tests.yardstick import check_error

WIDTH = 12
TRITON, CUTE, TORCH = LIBRARIES
RUNS = [
    *(
        pytest.param(TRITON, *device.values, marks=device.marks, id=f"triton-{device.values[0]}")
        for device in TRITON_DEVICES
    ),
    pytest.param(TORCH, "cpu", id="torch-cpu"),
    pytest.param(TORCH, "cuda", marks=pytest.mark.gpu, id="torch-cuda"),
]
TOKENS, EXPERTS, TOP_KS = (0, 1, 3, 64, 129, 4096), (8, 64, 128, 256), (1, 2, 4, 6, 8)
PAIRWISE = [
    (tokens, EXPERTS[(i + j) % len(EXPERTS)], top_k)
    for i, tokens in enumerate(TOKENS)
    for j, top_k in enumerate(TOP_KS)
]


def triton_module(name: str) -> Any:
    """Imported late, for Triton to see whether it interprets."""
    return import_module(f"dist_infer.kernels.triton.{name}")


def random_rows(num_rows: int, num_experts: int, top_k: int, *, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids with some -1 and an expert that nobody chooses, weights; in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.rand(num_rows, num_experts + top_k, generator=generator).argsort(1)[:, :top_k]
    ids[(ids >= num_experts) | (ids == 1)] = -1
    return x, ids, torch.rand(num_rows, top_k, generator=generator, dtype=torch.float64)


def in_its_dtype(x: Tensor, ids: Tensor, weights: Tensor, dense: DenseExperts) -> Tensor:
    """Plain torch that rounds what the contract rounds."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(x.shape, dtype=wide)
    for row, row_ids in enumerate(ids.tolist()):
        for k, expert in enumerate(row_ids):
            if expert >= 0:
                gate, up = functional.linear(x[row], dense.gate_up[expert].to(x.dtype)).chunk(2)
                output = functional.linear(functional.silu(gate) * up, dense.down[expert].to(x.dtype))
                out[row] += weights[row, k].to(wide) * output.to(wide)
    return out.to(x.dtype)


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_experts", "inner", "top_k", "id_dtype"),
    [
        (torch.float64, 63, 5, 7, 3, torch.int32),
        (torch.float64, 1, 1, 9, 1, torch.int64),
        (torch.float64, 0, 3, 4, 2, torch.int64),
        (torch.float32, 129, 8, 16, 2, torch.int64),
        (torch.bfloat16, 129, 4, 33, 4, torch.int32),
        (torch.float16, 63, 3, 8, 2, torch.int32),
        (torch.float32, 5, 0, 4, 2, torch.int32),
        (torch.float32, 5, 3, 0, 2, torch.int32),
    ],
)
def test_against_the_formula(
    device: str,
    library: Library[MoeExpertsFunction],
    dtype: torch.dtype,
    num_rows: int,
    num_experts: int,
    inner: int,
    top_k: int,
    id_dtype: torch.dtype,
) -> None:
    if library is TRITON and dtype == torch.float64:
        dtype = torch.bfloat16
    dense = DenseExperts.random(num_experts, inner, WIDTH)
    rounded = DenseExperts(dense.gate_up.to(dtype).double(), dense.down.to(dtype).double())
    x, ids, weights = random_rows(num_rows, num_experts, top_k)
    x, weights = x.to(dtype), weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
    before = [part.clone() for part in (x, ids, weights)]
    out = moe_experts(
        x.to(device),
        ids.to(device, id_dtype),
        weights.to(device),
        dense.gate_up.to(device, dtype),
        dense.down.to(device, dtype),
        library=library,
    ).cpu()
    assert out.is_contiguous()
    check_error(out, rounded(x, ids, weights), in_its_dtype(x, ids, weights, dense))
    assert all(torch.equal(part, kept) for part, kept in zip((x, ids, weights), before, strict=True))


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize("num_rows", [1, 9])  # pair by pair, in blocks
def test_another_activation(device: str, library: Library[MoeExpertsFunction], num_rows: int) -> None:
    dense = DenseExperts.random(8, 16, WIDTH)
    x, ids, weights = random_rows(num_rows, 8, 2)
    x, gate_up, down = 4 * x.float(), dense.gate_up.float(), dense.down.float()
    args = [part.to(device) for part in (x, ids, weights.float(), gate_up, down)]
    out = moe_experts(*args, activation=GatedActivation.SWIGLUOAI, library=library)
    truth = torch.zeros_like(x)
    for row, k in (ids >= 0).nonzero().tolist():
        gate, up = (gate_up[ids[row, k]] @ x[row]).chunk(2)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        truth[row] += weights[row, k] * (down[ids[row, k]] @ (gate * (1.702 * gate).sigmoid() * (up + 1)))
    torch.testing.assert_close(out.cpu(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("library", "device"), RUNS)
def test_what_is_not_routed_here_shows_nowhere(device: str, library: Library[MoeExpertsFunction]) -> None:
    dense = DenseExperts.random(4, 5, WIDTH)
    x, ids, weights = (part.to(device) for part in random_rows(20, 4, 3))
    x, weights = x.float(), weights.float()
    gate_up, down = dense.gate_up.to(device).float(), dense.down.to(device).float()
    ids[3] = -1
    clean = moe_experts(x, ids, weights, gate_up, down, library=library)
    assert clean[3].tolist() == [0.0] * WIDTH
    weights[ids < 0] = math.nan
    x[3] = math.nan
    gate_up[1] = math.nan  # nobody chooses it
    assert torch.equal(moe_experts(x, ids, weights, gate_up, down, library=library), clean)


@pytest.mark.parametrize(("library", "device"), RUNS)
def test_terms_are_added_in_the_order_of_the_slots(device: str, library: Library[MoeExpertsFunction]) -> None:
    """Experts that give 2^30, 1, -2^30, 1: what is lost in float32 tells the order of the sum."""
    outputs = torch.tensor([2.0**30, 1.0, -(2.0**30), 1.0], device=device)
    gate_up = torch.tensor([32.0, 1.0], device=device).view(1, 2, 1).expand(4, 2, 1).contiguous()  # silu(32) is 32
    down = (outputs / 32).view(4, 1, 1)
    ids = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3], [1, 3, 0, 2], [2, 0, 3, 1]], device=device)
    x, weights = torch.ones(4, 1, device=device), torch.ones(4, 4, device=device)
    assert moe_experts(x, ids, weights, gate_up, down, library=library).tolist() == [[1.0], [2.0], [0.0], [2.0]]


def by_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, library: Library[MoeExpertsFunction]
) -> Tensor:
    """Outputs one by one, and then their sum."""
    unsummed = next(other for other in OUTPUTS_LIBRARIES if other.name == library.name)
    outputs = expert_outputs(x, ids, weights, gate_up, down, library=unsummed)
    return moe_finalize(outputs, library=FINALIZE_LIBRARIES[library is TORCH])


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize(("num_rows", "num_experts"), [(0, 8), (1, 8), (9, 8), (2, 0)])  # pair by pair, in blocks
def test_outputs_one_by_one_add_up_to_the_same_bytes(
    device: str, library: Library[MoeExpertsFunction], num_rows: int, num_experts: int
) -> None:
    dense = DenseExperts.random(num_experts, 16, WIDTH)
    x, ids, weights = random_rows(num_rows, num_experts, 2)
    args = (x.bfloat16(), ids.int(), weights.float(), dense.gate_up.bfloat16(), dense.down.bfloat16())
    on_device = [part.to(device) for part in args]
    out = moe_experts(*on_device, library=library)
    assert torch.equal(by_outputs(*on_device, library=library), out)


def test_all_rows_to_one_expert_and_none_to_the_others() -> None:
    dense = DenseExperts.random(3, 5, WIDTH)
    x, _, weights = random_rows(40, 3, 1)
    ids = torch.full((40, 1), 2)
    out = moe_experts(x, ids, weights, dense.gate_up, dense.down, library=TORCH)
    torch.testing.assert_close(out, dense(x, ids, weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("way", ["pairs", "blocks", "blocks, swapped"])
@pytest.mark.parametrize("width", [WIDTH, 32])  # rows that can't be copied by descriptor, and that can
def test_every_way_through_the_kernels(device: str, way: str, width: int) -> None:
    """Blocks of several programs, some full, some not; experts without pairs."""
    num_rows, num_experts, inner, top_k = 4 if way == "pairs" else 20, 5, 24, 2
    dense = DenseExperts.random(num_experts, inner, width)
    _, ids, weights = random_rows(num_rows, num_experts, top_k)
    ids[:18, 0] = 3
    ids = ids.int().contiguous()
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(4)).bfloat16()
    gate_up, down = dense.gate_up.bfloat16(), dense.down.bfloat16()
    args = [part.to(device) for part in (x, ids, weights.float(), gate_up, down)]
    tiles = triton_module("moe_tiles")
    if way == "pairs":
        pairs, tile = triton_module("moe_pairs"), tiles.PairTile(8, 16, 4)
        hidden = pairs.pair_gate_up(args[0], args[1], args[3], tile)
        out = pairs.pair_down(hidden, *args[1:3], args[4], tile)
    else:
        tile = tiles.Tile(16, 16, 4, 2, swap=way != "blocks")
        out = triton_module("moe_experts").experts_by_block(*args, tiles.Tiles(1, 16, tile, tile))
    truth = DenseExperts(gate_up.double(), down.double())(x, ids, weights.float())
    check_error(out.cpu(), truth, in_its_dtype(x, ids, weights.float(), dense))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("num_pairs", [1, 70, 300, 4200])
def test_pairs_are_put_in_the_order_of_their_experts(device: str, num_pairs: int) -> None:
    """Those of one expert in ascending order, in blocks that its last pairs may leave part empty."""
    num_experts, block_len = 5, 16
    ids = torch.randint(-1, num_experts, (num_pairs,), generator=torch.Generator().manual_seed(num_pairs)).int()
    ids[ids == 2] = 4
    blocks = triton_module("moe_align").align(ids.to(device), num_experts, block_len)
    order, table = blocks.order.cpu(), blocks.table.cpu()
    expected = ids.argsort(stable=True)[int((ids < 0).sum()) :]
    assert order[: len(expected)].tolist() == expected.tolist()
    assert blocks.firsts.tolist() == [int(((ids >= 0) & (ids < expert)).sum()) for expert in range(num_experts + 1)]
    found = []
    for expert, start, end in table.T.tolist():
        if expert >= 0:
            members = order[start : min(end, start + block_len)].tolist()
            assert members and all(int(ids[pair]) == expert for pair in members)
            found += members
    assert found == expected.tolist()


def gpu_case(
    num_rows: int, num_experts: int, top_k: int, width: int, inner: int, *, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights, gate_up, down; one id in eight is -1, and its weight is NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    ids = torch.rand(num_rows, num_experts, generator=generator, device="cuda").argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=generator, device="cuda") < 0.125] = -1
    weights = torch.rand(ids.shape, generator=generator, device="cuda").masked_fill(ids < 0, math.nan)
    scale = width**-0.5
    return (
        normal(num_rows, width),
        ids,
        weights,
        normal(num_experts, 2 * inner, width) * scale,
        normal(num_experts, width, inner),
    )


def check_against_float64(out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> None:
    args = (x, ids, weights, gate_up, down)
    wide = (part.double() if part.is_floating_point() else part for part in args)
    truth = moe_experts(*wide, library=TORCH)
    check_error(out, truth, moe_experts(*args, library=TORCH))


def on_gpu(name: str) -> Library[MoeExpertsFunction]:
    """A library, or a skip where its package is missing."""
    if name == CUTE.name:
        pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    return {"triton": TRITON, "cute": CUTE}[name]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "num_experts", "top_k"), PAIRWISE)
@pytest.mark.parametrize(("name", "inner"), [("triton", 96), ("cute", 192)])
def test_many_sizes(num_rows: int, num_experts: int, top_k: int, name: str, inner: int) -> None:
    args = gpu_case(num_rows, num_experts, top_k, 256, inner)
    check_against_float64(moe_experts(*args, library=on_gpu(name)), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 200])  # with up to 512 pairs and more, which are put in order elsewhere
def test_every_form_that_tuning_may_choose(num_rows: int) -> None:
    args = gpu_case(num_rows, 16, 4, 384, 192)
    for tactic in on_gpu("cute").tactics:
        check_against_float64(moe_experts(*args, library=CUTE.told(tactic)), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 700])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_and_odd_sizes(num_rows: int, dtype: torch.dtype) -> None:
    x, ids, weights, gate_up, down = gpu_case(num_rows, 24, 3, 200, 72)
    args = (x.to(dtype), ids.long(), weights, gate_up.to(dtype), down.to(dtype))
    check_against_float64(moe_experts(*args, library=TRITON), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 4096])
@pytest.mark.parametrize("case", ["all on one", "a slice", "one row in four is padding"])
@pytest.mark.parametrize("name", ["triton", "cute"])
def test_uneven_routing(num_rows: int, case: str, name: str) -> None:
    x, ids, weights, gate_up, down = gpu_case(num_rows, 64, 6, 512, 128)
    if case == "all on one":
        ids[:, 0], ids[:, 1:] = 37, -1
    elif case == "a slice":
        ids, gate_up, down = torch.where((ids >= 16) & (ids < 32), ids - 16, -1), gate_up[16:32], down[16:32]
    else:
        ids[::4], x[::4] = -1, math.nan
    weights = weights.nan_to_num(0.5).masked_fill(ids < 0, math.nan)
    args = (x, ids, weights, gate_up, down)
    out = moe_experts(*args, library=on_gpu(name))
    clean = (x.nan_to_num(), ids, weights.nan_to_num(), gate_up, down)
    check_against_float64(out, *clean)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 512])
@pytest.mark.parametrize("name", ["triton", "cute"])
def test_a_graph_replays_with_another_routing(num_rows: int, name: str) -> None:
    library = on_gpu(name)
    cases = [gpu_case(num_rows, 64, 6, 256, 128, seed=seed) for seed in range(3)]
    x, ids, weights, gate_up, down = (part.clone() for part in cases[0])
    moe_experts(x, ids, weights, gate_up, down, library=library)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(x, ids, weights, gate_up, down, library=library)
    for idx, case in enumerate(cases):
        for static, new in zip((x, ids, weights), case, strict=False):
            static.copy_(new)
        if idx == 2:
            ids.fill_(-1)
            ids[0, 0], weights[0, 0] = 63, 0.5
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, moe_experts(x, ids, weights, gate_up, down, library=library))
        assert not out.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cute"])
def test_offsets_beyond_32_bits(name: str) -> None:
    """2.3 G elements of outputs, and of weights."""
    args = gpu_case(40_000, 160, 8, 7168, 1024)
    x, ids, weights, gate_up, down = args
    out = moe_experts(*args, library=on_gpu(name))
    rows = torch.tensor([0, 1, 20_000, 39_999], device="cuda")
    used = torch.tensor(sorted({*ids[rows].flatten().tolist()} - {-1}), device="cuda")
    local = torch.full((161,), -1, dtype=torch.int64, device="cuda")
    local[used] = torch.arange(len(used), device="cuda")
    check_against_float64(out[rows], x[rows], local[ids[rows].long()], weights[rows], gate_up[used], down[used])


HOPPER_TILES = [("gate_up", 16, (64, 128, 4, 3, True, False)), ("down", 128, (256, 64, 8, 4, False, True))]


@pytest.mark.parametrize(("product", "block_m", "numbers"), HOPPER_TILES)
def test_products_compile_for_hopper(
    product: str, block_m: int, numbers: tuple[int, int, int, int, bool, bool]
) -> None:
    tile = triton_module("moe_tiles").Tile(*numbers)
    kernel = getattr(triton_module("grouped_gemm"), f"_{product}_kernel")
    source = "x" if product == "gate_up" else "hidden"
    types = {source: "*bf16", "order": "*i32", "table": "*i32", "out": "*bf16", "num_blocks": "i32"}
    types["weight"] = f"tensordesc<bf16[{tile.block_n}, {tile.block_k}]>"
    if product == "down":
        types["hidden_matrix"] = f"tensordesc<bf16[{block_m}, {tile.block_k}]>"
    sizes: dict[str, object] = {"OVERLAP": True, "DESCRIPTOR": True, "INNER": 768, "WIDTH": 2048, "BLOCK_M": block_m}
    sizes |= {"TOP_K": 8, "ACTIVATION": "silu"} if product == "gate_up" else {"HIDDEN_DESCRIPTOR": True}
    sizes |= dict(zip(("BLOCK_N", "BLOCK_K", "SWAP", "TAILS"), tile.sizes, strict=True))
    made = compile_ahead(kernel, types, sizes, **tile.launch)
    assert made.spilled_bytes == 0
    ptx = made.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx  # weights by the hardware's copies of tiles
    assert "cp.async.cg.shared.global" in ptx and "cp.async.ca" not in ptx  # rows by 16 bytes
    assert "st.global.v4" in ptx or "st.global.b128" in ptx or "v4.b32" in ptx


def test_the_products_for_hopper_take_whole_tiles() -> None:
    def refusal(**geometry: int) -> str | None:
        return CUTE.is_available(Target(device=torch.device("cuda"), dtype=torch.bfloat16, geometry=geometry))

    assert refusal(experts=8, width=2048, intermediate=100) == "takes channels in multiples of 64, not 2048 and 100"
    assert refusal(experts=8, intermediate=128) == "takes channels in multiples of 64, not 0 and 128"
    assert refusal(experts=257, width=64, intermediate=64) == "takes up to 256 experts, not 257"


def test_bad_calls_are_refused() -> None:
    dense = DenseExperts.random(3, 5, WIDTH)
    x, ids, weights = random_rows(4, 3, 2)

    def call(
        x: Tensor = x,
        ids: Tensor = ids,
        weights: Tensor = weights,
        gate_up: Tensor = dense.gate_up,
        down: Tensor = dense.down,
    ) -> Tensor:
        return moe_experts(x, ids, weights, gate_up, down, library=TORCH)

    assert call().shape == (4, WIDTH)
    with pytest.raises(ValueError, match=r"x \[3, 12\], ids \[4, 2\]"):
        call(x=x[:3])
    with pytest.raises(ValueError, match=r"weights \[4, 1\] are not"):
        call(weights=weights[:, :1])
    with pytest.raises(ValueError, match=r"weights \[3, 8, 12\] and \[3, 12, 5\] are not \[E, 2 I, 12\]"):
        call(gate_up=dense.gate_up[:, 2:])
    with pytest.raises(ValueError, match="meets weights torch.float32 and torch.float64"):
        call(gate_up=dense.gate_up.float())
    with pytest.raises(ValueError, match="ids torch.int16"):
        call(ids=ids.short())
    with pytest.raises(ValueError, match="weights torch.float16"):
        call(weights=weights.half())
    with pytest.raises(ValueError, match="id 7 is not one of the 3 experts held"):
        call(ids=torch.full((4, 2), 7))
    with pytest.raises(ValueError, match="id -2 is not one of the 3 experts held"):
        call(ids=torch.full((4, 2), -2))
