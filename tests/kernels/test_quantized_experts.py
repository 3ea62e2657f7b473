"""Experts with quantised weights: against float64, and byte by byte against weights that are dequantised before."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.quantized_experts import LIBRARIES, QuantizedExpertsFunction, misfit, quantized_experts
from dist_infer.kernels.reference.quantize import quantize as reference_quantize
from dist_infer.kernels.scaled_linear import WeightFormat
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_devices
from tests.kernels.quantized_weights import quantized
from tests.kernels.triton_interpreter import TRITON_DEVICES
from tests.yardstick import check_error

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, of unused lanes

BF16 = torch.bfloat16
FORMATS = list(LIBRARIES)
TRITON, CUTE, TORCH = LIBRARIES[WeightFormat.FP8_BLOCK]  # those of all formats
EVERY_CASE = pytest.mark.parametrize(
    ("weight_format", "library", "device"),
    [
        *(
            pytest.param(weight_format, *case.values, marks=case.marks, id=f"{weight_format.value}-{case.id}")
            for weight_format in LIBRARIES
            for case in library_devices((TRITON, TORCH))
        ),
        *(
            pytest.param(weight_format, CUTE, "cuda", marks=pytest.mark.gpu, id=f"{weight_format.value}-cute-cuda")
            for weight_format in LIBRARIES
        ),
    ],
)
ON_GPU = pytest.mark.parametrize("library", [TRITON, CUTE], ids=["triton", "cute"])
Case = tuple[Tensor, Tensor, Tensor, QuantizedTensor, QuantizedTensor]


def triton_module(name: str) -> Any:
    """Imported late, for Triton to see whether it interprets."""
    return import_module(f"dist_infer.kernels.triton.{name}")


def random_case(
    weight_format: WeightFormat, num_rows: int, num_experts: int, top_k: int, width: int, inner: int, device: str
) -> Case:
    """x, ids with some -1 whose weights are NaN, weights, and both weights of the experts."""
    generator = torch.Generator(device).manual_seed(num_rows + num_experts)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(BF16)

    ids = torch.rand(num_rows, num_experts, generator=generator, device=device).argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=generator, device=device) < 0.125] = -1
    weights = torch.rand(ids.shape, generator=generator, device=device).masked_fill(ids < 0, math.nan)
    gate_up = quantized(normal(num_experts * 2 * inner, width) * width**-0.5, weight_format)
    return normal(num_rows, width), ids, weights, gate_up, quantized(normal(num_experts * width, inner), weight_format)


def narrowed(x: Tensor) -> Tensor:
    """The values of x quantised 1 x 128, in its dtype's wide form."""
    carrier = Fp8Tensor.empty(x.shape[0], x.shape[1], Fp8Scaling.BLOCKS_1X128, device=x.device)
    reference_quantize(x.contiguous(), carrier)
    return dequantize(carrier, torch.float32)


def by_formula(case: Case, dtype: torch.dtype) -> Tensor:
    """In `dtype`, with what the contract rounds and quantises rounded and quantised."""
    x, ids, weights, w_gate_up, w_down = case
    width, inner = x.shape[1], w_down.shape[1]
    narrow = isinstance(w_down, Fp8Tensor)
    gate_up = dequantize(w_gate_up, torch.float32).to(dtype).view(-1, 2 * inner, width)
    down = dequantize(w_down, torch.float32).to(dtype).view(-1, width, inner)
    rows = (narrowed(x) if narrow else x).to(dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for expert in range(len(down)):
        for k in range(ids.shape[1]):
            taken = (ids[:, k] == expert).nonzero().squeeze(1)
            gate, up = (rows[taken] @ gate_up[expert].T).chunk(2, 1)
            hidden = (torch.nn.functional.silu(gate) * up).to(BF16)
            wide = (narrowed(hidden) if narrow and len(hidden) else hidden).to(dtype)
            out[taken] += weights[taken, k, None].to(dtype) * (wide @ down[expert].T).to(BF16).to(dtype)
    return out


def check(out: Tensor, case: Case) -> None:
    """The roundings of the formula are part of it: one that falls the other way costs a unit.

    The FP8 matrix units of sm_90 keep 14 bits of a partial sum, so more of the quantised channels fall the other way
    there: all in all less than a quarter of what another quantisation would cost.
    """
    truth = by_formula(case, torch.float64)
    assert out.dtype == BF16 and out.is_contiguous()
    error = (out.double() - truth).norm()
    if isinstance(case[-1], Fp8Tensor) and out.is_cuda:
        assert error <= 0.006 * truth.norm(), f"{error / truth.norm():.5f}"
        return
    yardstick = by_formula(case, torch.float32).to(BF16).double()
    allowed = (yardstick - truth).norm()
    assert error <= 1.1 * allowed, f"{error / allowed:.3f}"
    check_error(out.double(), truth, yardstick)


@EVERY_CASE
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "inner"), [(0, 3, 2, 128), (1, 32, 2, 128), (20, 3, 2, 128), (3, 2, 1, 256)]
)
def test_against_the_formula(
    weight_format: WeightFormat,
    library: Library[QuantizedExpertsFunction],
    device: str,
    num_rows: int,
    num_experts: int,
    top_k: int,
    inner: int,
) -> None:
    case = random_case(weight_format, num_rows, num_experts, top_k, 128, inner, device)
    check(quantized_experts(*case, library=library), case)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k"),
    [(1, 256, 8), (3, 64, 6), (15, 128, 8), (64, 256, 8), (129, 8, 2), (1000, 64, 4), (4096, 128, 1)],
)
def test_many_sizes(
    weight_format: WeightFormat,
    library: Library[QuantizedExpertsFunction],
    num_rows: int,
    num_experts: int,
    top_k: int,
) -> None:
    case = random_case(weight_format, num_rows, num_experts, top_k, 512, 384, "cuda")
    check(quantized_experts(*case, library=library), case)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("weight_format", FORMATS)
def test_offsets_beyond_32_bits(weight_format: WeightFormat, library: Library[QuantizedExpertsFunction]) -> None:
    """The outputs of the pairs are more than 2^31 elements; the last rows are what they are by themselves."""
    x, ids, weights, *both = random_case(weight_format, 40_000, 8, 8, 7168, 128, "cuda")
    out = quantized_experts(x, ids, weights, *both, library=library)[-64:].double()
    alone = quantized_experts(x[-64:], ids[-64:], weights[-64:], *both, library=library).double()
    assert (out - alone).norm() <= 2.0**-9 * alone.norm()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("weight_format", [WeightFormat.MXFP8, WeightFormat.NVFP4])
def test_weights_are_dequantised_without_an_error(weight_format: WeightFormat, device: str) -> None:
    """With numbers of few digits every sum is exact in any order, so the bytes are those of dequantised weights."""
    x, ids, *_ = random_case(weight_format, 20, 3, 2, 160, 32, device)
    rows = (x * 2).round().clamp(-4, 4).repeat_interleave(2, 0)  # in the order of the blocks
    matrix = (torch.randn(3 * 48, 160, generator=torch.Generator().manual_seed(1)) * 3).round().clamp(-12, 12)
    weight = quantized(matrix.to(device), weight_format)
    if isinstance(weight, Nvfp4Tensor):
        assert weight.global_scale is not None
        weight.global_scale.fill_(2.0)
        weight.scales.copy_(torch.randint(6, 9, weight.scales.shape).to(torch.uint8) * 8)  # powers of two
    align, tiles = triton_module("moe_align").align, triton_module("moe_tiles")
    blocks = align(ids, 3, 16)
    tile = tiles.Tile(16 if device == "cpu" else 64, 64, 4, 2)
    out = triton_module("quantized_gemm").down(rows, weight, 48, blocks, tile)
    exact = dequantize(weight, torch.float32).double().view(3, 48, 160)
    pairs = blocks.order[: int((ids >= 0).sum())].tolist()
    assert len(pairs) > 16
    for place, pair in enumerate(pairs):
        assert torch.equal(out[pair], (exact[int(ids.flatten()[pair])] @ rows[place].double()).to(BF16))


@EVERY_CASE
def test_what_is_not_routed_here_shows_nowhere(
    weight_format: WeightFormat, library: Library[QuantizedExpertsFunction], device: str
) -> None:
    cases = ((1, 32), (12, 2)) if device == "cuda" else ((12, 2),)  # pair by pair is slow when it is interpreted
    for num_rows, num_experts in cases:
        x, ids, weights, *both = random_case(weight_format, num_rows, num_experts, 2, 128, 128, device)
        ids[-1] = -1
        clean = quantized_experts(x, ids, weights.nan_to_num(), *both, library=library)
        assert clean[-1].tolist() == [0.0] * 128
        x[-1] = math.nan
        assert torch.equal(quantized_experts(x, ids, weights, *both, library=library), clean)


@pytest.mark.parametrize(
    ("library", "device"),
    [*library_devices((TRITON, TORCH)), pytest.param(CUTE, "cuda", marks=pytest.mark.gpu, id="cute-cuda")],
)
def test_rows_that_come_quantised(library: Library[QuantizedExpertsFunction], device: str) -> None:
    case = random_case(WeightFormat.FP8_BLOCK, 12, 2, 2, 128, 128, device)
    carrier = Fp8Tensor.empty(12, 128, Fp8Scaling.BLOCKS_1X128, device=case[0].device)
    reference_quantize(case[0], carrier)
    out = quantized_experts(carrier, *case[1:], library=library)
    assert torch.equal(out, quantized_experts(*case, library=library))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_graph_replays_with_another_routing(
    weight_format: WeightFormat, library: Library[QuantizedExpertsFunction], num_rows: int
) -> None:
    x, ids, weights, *both = random_case(weight_format, num_rows, 64, 6, 256, 128, "cuda")
    quantized_experts(x, ids, weights, *both, library=library)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_experts(x, ids, weights, *both, library=library)
    ids.copy_((ids + 7) % 64)
    weights.nan_to_num_(0.5)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, quantized_experts(x, ids, weights, *both, library=library))
    assert not out.isnan().any()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_products_compile_for_hopper(weight_format: WeightFormat) -> None:
    module, tiles = triton_module("quantized_gemm"), triton_module("moe_tiles")
    name = "fp8" if weight_format is WeightFormat.FP8_BLOCK else weight_format.value
    choice = tiles.quantized_tiles_for(64 * 8, 256, name)
    tile = choice.gate_up
    types = {"order": "*i32", "table": "*i32", "num_blocks": "i32"}
    types |= {"x": "*fp8e4nv" if name == "fp8" else "*bf16", "out": "*fp8e4nv" if name == "fp8" else "*bf16"}
    types["weight"] = f"tensordesc<fp8e4nv[{tile.block_n}, {tile.block_k}]>" if name == "fp8" else "*i16"
    types["scales"] = "*fp32" if name == "fp8" else "*u8"
    sizes: dict[str, object] = {"OVERLAP": True, "TOP_K": 8, "INNER": 256, "WIDTH": 7168, "FORMAT": name}
    sizes["ACTIVATION"] = "silu"
    sizes |= {"BLOCK_M": choice.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    for pointer, kept in (
        ("x_scales", name == "fp8"),
        ("out_scales", name == "fp8"),
        ("global_scale", name == "nvfp4"),
    ):
        if kept:
            types[pointer] = "*fp32"
        else:
            sizes[pointer] = None
    made = compile_ahead(module._gate_up_kernel, types, sizes, **tile.launch)
    assert made.spilled_bytes == 0
    assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.cg.shared.global" in made.asm["ptx"]
    assert ("cp.async.bulk.tensor" in made.asm["ptx"]) is ("e4m3.e4m3" in made.asm["ptx"]) is (name == "fp8")


def test_misfits_are_named() -> None:
    assert misfit(WeightFormat.FP8_BLOCK, 256, 384) is None
    assert misfit(WeightFormat.FP8_BLOCK, 256, 192) == "128 doesn't divide its 192 channels"
    assert misfit(WeightFormat.NVFP4, 24, 64) == "16 doesn't divide its 24 channels"
    assert misfit(WeightFormat.FP8, 256, 384) == "experts aren't held in fp8: use fp8-block, mxfp8, nvfp4"


def test_bad_calls_are_refused() -> None:
    x, ids, weights, w_gate_up, w_down = random_case(WeightFormat.MXFP8, 4, 3, 2, 128, 128, "cpu")
    other = random_case(WeightFormat.FP8_BLOCK, 4, 3, 2, 128, 128, "cpu")
    library = LIBRARIES[WeightFormat.MXFP8][-1]
    for args, message in (
        ((x[:3], ids, weights, w_gate_up, w_down), r"x \[3, 128\], ids \[4, 2\]"),
        ((x, ids, weights[:, :1], w_gate_up, w_down), r"weights \[4, 1\] are not"),
        ((x, ids, weights, w_down, w_down), r"weights \[384, 128\] and \[384, 128\] are not \[E 2 I, 128\]"),
        ((x, ids, weights, w_gate_up, other[4]), "Mxfp8Tensor meets Fp8Tensor"),
        ((x, ids.short(), weights, w_gate_up, w_down), "ids torch.int16"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_experts(*args, library=library)
