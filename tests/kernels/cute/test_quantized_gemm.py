"""Grouped products with quantised weights in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.carriers import (
    Fp8Scaling,
    Fp8Tensor,
    GatedActivation,
    Mxfp8Tensor,
    Nvfp4Tensor,
    QuantizedTensor,
    ScaleLayout,
)
from dist_infer.kernels.cute import grouped_gemm as wide_op
from dist_infer.kernels.cute import quantized_gemm as op
from dist_infer.kernels.cute.grouped_gemm_parts import STEP
from dist_infer.kernels.cute.grouped_gemm_parts import Variant as WideVariant
from dist_infer.kernels.cute.quantized_forms import FORMS
from dist_infer.kernels.cute.quantized_parts import Variant
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.reference.quantize import quantize
from dist_infer.kernels.reference.silu_mul import silu_mul
from dist_infer.kernels.scaled_linear import WeightFormat
from tests.kernels.cute.ragged_pairs import COUNTS, TOP_K, normal, ragged
from tests.kernels.quantized_weights import quantized

FORMATS = (WeightFormat.FP8_BLOCK, WeightFormat.MXFP8, WeightFormat.NVFP4)
WIDTH, INNER = 384, 256
# The FP8 matrix units align the products of 32 channels and the sum so far to the largest of them and cut off what is
# below its 14th bit, so what is lost goes with the magnitudes of the products, not with their sum.
SLACK = 2**-10


def variant(
    weight_format: WeightFormat, activation: GatedActivation | None, num_groups: int = 2, channels: int = 0
) -> Variant:
    """Of fewer stages and sizes than are chosen for speed: a ring goes round often.

    Over `channels` that are pairs of stages the scales of two come together where the format allows it.
    """
    is_even = weight_format is not WeightFormat.FP8_BLOCK and channels % 256 == 0 and channels > 0
    return Variant(
        weight_format=weight_format,
        activation=activation,
        sizes=(40, 96) if num_groups == 2 else (8, 16),
        num_stages=3,
        num_groups=num_groups,
        num_ctas=3 - num_groups,
        scale_stages=2 if is_even else 1,
    )


SEVERAL = pytest.mark.parametrize(
    ("activation", "num_groups"), [(GatedActivation.SILU, 2), (GatedActivation.SWIGLUOAI, 1)]
)


@pytest.mark.parametrize(
    ("weight_format", "activation", "num_groups", "channels"),
    [
        (WeightFormat.FP8_BLOCK, GatedActivation.SILU, 2, 0),
        (WeightFormat.FP8_BLOCK, None, 1, 0),
        (WeightFormat.MXFP8, None, 1, 512),
        (WeightFormat.NVFP4, GatedActivation.SWIGLUOAI, 1, 0),
    ],
)
def test_variants_compile_without_a_gpu(
    weight_format: WeightFormat, activation: GatedActivation | None, num_groups: int, channels: int, tmp_path: Path
) -> None:
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}"
    own = variant(weight_format, activation, num_groups, channels)
    ptx = op.compiled(own, has_global_scale=own.is_nvfp4, options=options).__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx
    kind = "k32.f32.e4m3.e4m3" if own.is_fp8 else "k16.f32.bf16.bf16"
    assert f"wgmma.mma_async.sync.aligned.m64n{own.sizes[0]}{kind}" in ptx
    assert ("ldmatrix" in ptx) is not own.is_fp8  # the weights of others go through registers
    assert "cp.async.bulk.tensor.2d" in ptx and "cp.async.cg.shared.global" in ptx
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) is own.quantizes
    assert "ld.local" not in ptx


def test_forms_are_of_whole_steps() -> None:
    """Threads copy and store so many pairs at a time: of the last ones of another tile none would care."""
    for choices in FORMS.values():
        for _, *both in choices:
            for form in both:
                assert not form.sizes[-1] % STEP and not any(size % 8 for size in form.sizes)


def in_blocks(rows: Tensor) -> Fp8Tensor:
    out = Fp8Tensor.empty(rows.shape[0], rows.shape[1], Fp8Scaling.BLOCKS_1X128, device=rows.device)
    quantize(rows, out)
    return out


def places(width: int, weight_format: WeightFormat) -> Tensor:
    """The channel at each place; see triton/channel_places."""
    channel = torch.arange(width, device="cuda")
    if weight_format is WeightFormat.FP8_BLOCK:
        return channel
    if weight_format is WeightFormat.NVFP4:
        return channel.view(-1, 4, 2, 2, 2).permute(0, 3, 4, 1, 2).reshape(-1)
    return channel.view(-1, 4, 2, 2).permute(0, 3, 1, 2).reshape(-1)


def operand(rows: Tensor, weight_format: WeightFormat) -> Tensor | Fp8Tensor:
    if weight_format is WeightFormat.FP8_BLOCK:
        return in_blocks(rows)
    return rows[:, places(rows.shape[1], weight_format)].contiguous()


def values(rows: Tensor | Fp8Tensor, weight_format: WeightFormat) -> Tensor:
    """What an operand or a result is, its channels in order."""
    if isinstance(rows, Fp8Tensor):
        return dequantize(rows, torch.float64)
    return rows.double()[:, places(rows.shape[1], weight_format).argsort()]


def poisoned(outputs: Tensor | Fp8Tensor) -> None:
    """The next tensor of this size has NaN where nothing is written: the allocator gives it the same memory."""
    for part in (outputs.data, outputs.scales) if isinstance(outputs, Fp8Tensor) else (outputs,):
        part.view(torch.uint8).fill_(0xFF)


def by_experts(rows: Tensor, weight: QuantizedTensor, ends: list[int]) -> tuple[Tensor, Tensor]:
    """The product of float64 rows, in the order of the experts, with the weights of theirs; and of their magnitudes."""
    matrices = dequantize(weight, torch.float64).view(len(ends) - 1, -1, weight.shape[1])
    return _by_matrices(rows, matrices, ends), _by_matrices(rows.abs(), matrices.abs(), ends)


def _by_matrices(rows: Tensor, matrices: Tensor, ends: list[int]) -> Tensor:
    parts = [rows[first:end] @ matrix.T for first, end, matrix in zip(ends, ends[1:], matrices, strict=False)]
    return torch.cat(parts)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@SEVERAL
@pytest.mark.parametrize(("counts", "num_dead"), COUNTS)
def test_gate_up_against_float64(
    counts: list[int], num_dead: int, activation: GatedActivation, num_groups: int, weight_format: WeightFormat
) -> None:
    order, firsts = ragged(counts, num_dead)
    ends = firsts.tolist()
    width = WIDTH if num_groups == 2 else 512
    x = operand(normal(len(order) // TOP_K, width) * width**0.5 * 4, weight_format)
    weight = quantized(normal(len(counts) * 2 * INNER, width), weight_format)
    own = variant(weight_format, activation, num_groups, width)
    poisoned(op.gate_up(x, weight, len(counts), order, firsts, TOP_K, own))
    out = op.gate_up(x, weight, len(counts), order, firsts, TOP_K, own)
    rows = values(x, weight_format)[(order[: ends[-1]] // TOP_K).long()]
    sums, magnitudes = by_experts(rows, weight, ends)
    truth = silu_mul(sums, activation)
    gate, up = sums.chunk(2, dim=1)
    gate_slack, up_slack = (magnitudes * SLACK).chunk(2, dim=1)
    # no slope of either activation is above 1.2, and SwiGLU-OAI multiplies by up + 1
    slack = 1.2 * gate_slack * (up.abs() + 1 + up_slack) + gate.abs() * up_slack
    assert isinstance(out, Fp8Tensor) is own.quantizes
    if isinstance(out, Fp8Tensor):
        check_blocks(out, truth, slack)
    elif own.is_fp8:
        check_narrow(values(out, weight_format)[: ends[-1]], truth, slack)
    else:
        check(values(out, weight_format)[: ends[-1]], truth)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(("counts", "num_dead"), COUNTS)
def test_down_against_float64(counts: list[int], num_dead: int, num_groups: int, weight_format: WeightFormat) -> None:
    order, firsts = ragged(counts, num_dead)
    ends = firsts.tolist()
    rows = normal(len(order), INNER) * INNER**0.5
    rows[ends[-1] :] = float("nan")
    hidden = operand(rows, weight_format)
    weight = quantized(normal(len(counts) * WIDTH, INNER), weight_format)
    own = variant(weight_format, None, num_groups, INNER)
    poisoned(op.down(hidden, weight, len(counts), order, firsts, own))
    out = op.down(hidden, weight, len(counts), order, firsts, own)
    truth, magnitudes = by_experts(values(hidden, weight_format), weight, ends)
    in_order = out[order[: ends[-1]].long()].double()
    if own.is_fp8:
        check_narrow(in_order, truth, magnitudes * SLACK)
    else:
        check(in_order, truth)


def check(out: Tensor, truth: Tensor) -> None:
    """Float32 sums, rounded once."""
    assert ((out - truth).abs() <= (2**-8 + 2**-12) * truth.abs() + 2**-14 * truth.abs().max()).all()
    wrong = (out != truth.bfloat16().double()).double().mean()
    assert wrong < 0.02, f"{wrong:.1%} of the values are not the truth rounded once"


def check_narrow(out: Tensor, truth: Tensor, slack: Tensor) -> None:
    """Sums of the FP8 matrix units, rounded once: each near, and all of them much nearer than a channel is large."""
    error = (out - truth).abs()
    assert (error <= (2**-8 + 2**-12) * truth.abs() + slack).all(), f"{((error - slack) / truth.abs()).max():.5f}"
    assert error.square().mean() <= (2**-16 + 2**-18) * truth.square().mean() + (slack / 8).square().mean()


def check_blocks(out: Fp8Tensor, truth: Tensor, slack: Tensor) -> None:
    """The truth in blocks of 1 x 128, rounded to bfloat16 before."""
    kept, scales = len(truth), out.scales[: len(truth)].double()
    largest, slacks = (rows.view(kept, -1, 128).amax(-1) for rows in (truth.abs(), slack))
    assert ((448 * scales - largest).abs() <= 2**-7 * largest + slacks).all()
    error = (dequantize(out, torch.float64)[:kept] - truth).abs()
    smallest = 2**-10 * scales.repeat_interleave(128, dim=1)  # half a step between the smallest e4m3
    assert (error <= (2**-4 + 2**-7) * truth.abs() + smallest + (1 + 2**-3) * slack).all()
    assert error.square().mean() <= 2**-10 * truth.square().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS)
def test_pairs_that_the_products_order(weight_format: WeightFormat) -> None:
    """Bytes are those of pairs that were put in order before."""
    ids = torch.randint(-1, 9, (170, TOP_K), generator=torch.Generator().manual_seed(1)).int().cuda()
    ids[ids == 4] = 8  # which isn't held
    flat = torch.where((ids >= 0) & (ids < 8), ids, 8).flatten()
    firsts = torch.tensor([int((flat < expert).sum()) for expert in range(9)]).int().cuda()
    order, kept = flat.argsort(stable=True).int(), int(firsts[-1])
    x = operand(normal(len(ids), WIDTH) * WIDTH**0.5, weight_format)
    w_up, w_down = (quantized(normal(8 * rows, columns), weight_format) for rows, columns in ((512, WIDTH), (384, 256)))
    first, second = (variant(weight_format, kind, 1) for kind in (GatedActivation.SILU, None))
    hidden = op.gate_up(x, w_up, 8, order, firsts, TOP_K, first)
    own = op.gate_up(x, w_up, 8, ids.flatten(), ids.flatten(), TOP_K, replace(first, orders=True))
    assert isinstance(hidden, Tensor) and isinstance(own, Tensor)
    assert torch.equal(own[:kept], hidden[:kept])
    inputs = in_blocks(hidden) if first.is_fp8 else hidden
    out = op.down(inputs, w_down, 8, order, firsts, second)
    own = op.down(inputs, w_down, 8, ids.flatten(), ids.flatten(), replace(second, orders=True))
    held = order[:kept].long()
    assert torch.equal(own[held], out[held])


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", FORMATS[1:])
@pytest.mark.parametrize("activation", [GatedActivation.SILU, None])
def test_bytes_are_those_of_weights_dequantised_before(
    weight_format: WeightFormat, activation: GatedActivation | None
) -> None:
    """bfloat16 holds the weights, so with inputs in the same order the wide products round the same sums."""
    counts = [48, 49, 0, 97, 1, 15]
    order, firsts = ragged(counts, 0)
    rows = normal(len(order), WIDTH) * 16
    matrix = normal(len(counts) * 2 * INNER, WIDTH) * 16
    weight = quantized(matrix, weight_format)
    if isinstance(weight, Nvfp4Tensor):
        assert weight.global_scale is not None
        weight.global_scale.fill_(64.0)  # the wide products know none, so it is a power of two
    wide = dequantize(weight, torch.float32).bfloat16()
    assert torch.equal(wide.double(), dequantize(weight, torch.float64))
    in_order = wide[:, places(WIDTH, weight_format)].view(len(counts), 2 * INNER, WIDTH).contiguous()
    own = variant(weight_format, activation)
    other = WideVariant(activation=activation, sizes=own.sizes, num_stages=4, dtype=torch.bfloat16)
    kept = int(firsts[-1])
    if activation is None:
        out = op.down(rows, weight, len(counts), order, firsts, own)
        assert torch.equal(out, wide_op.down(rows, in_order, order, firsts, other))
    else:
        hidden = op.gate_up(rows, weight, len(counts), order, firsts, TOP_K, own)
        assert isinstance(hidden, Tensor)
        expected = wide_op.gate_up(rows, in_order, order, firsts, TOP_K, other)
        assert torch.equal(hidden[:kept], expected[:kept, places(INNER, weight_format)])


def test_what_no_variant_takes_is_refused() -> None:
    order, firsts = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    weight = Mxfp8Tensor.empty(2 * 128, 128, ScaleLayout.LINEAR, device=torch.device("cpu"))
    narrow = Mxfp8Tensor.empty(2 * 128, 96, ScaleLayout.LINEAR, device=torch.device("cpu"))
    rows = torch.zeros(4, 128, dtype=torch.bfloat16)
    own = variant(WeightFormat.MXFP8, None)
    for wrong, matrix, num_experts, taken in (
        (rows.half(), weight, 2, own),
        (rows[:, :96], narrow, 2, own),
        (rows, weight, 4, own),
        (rows, weight, 257, own),
        (rows, weight, 2, variant(WeightFormat.NVFP4, None)),
    ):
        with pytest.raises(ValueError, match="down: rows"):
            op.down(wrong, matrix, num_experts, order, firsts, taken)
    many = torch.zeros(513, dtype=torch.int32)
    with pytest.raises(ValueError, match="513 pairs are not in order"):
        op.down(rows, weight, 2, many, many, replace(variant(WeightFormat.MXFP8, None, 1), orders=True))
