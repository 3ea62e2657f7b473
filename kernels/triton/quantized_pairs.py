"""The experts of few tokens with quantised weights: each pair of a row and an expert by itself, in two Triton launches.

R rows, K experts a row, P = R K pairs, E experts, D model, I intermediate channels. As moe_pairs, whose weights aren't
quantised. FORMAT is "fp8", "mxfp8" or "nvfp4"; a weight's row is a sequence of blocks with a scale each, and products
are summed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Tensor, GatedActivation, QuantizedTensor
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.moe_tiles import PairTile
from dist_infer.kernels.triton.number_formats import encode_fp8_blocks, spread_e2m1, ue8m0_value
from dist_infer.kernels.triton.quantized_gemm import Parts
from dist_infer.kernels.triton.silu_mul import gated


def pair_gate_up(
    x: Tensor | Fp8Tensor,
    expert_ids: Tensor,
    weight: QuantizedTensor,
    num_experts: int,
    tile: PairTile,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """silu(gate) * up of all pairs, rounded to bfloat16; those of no expert are not written.

    Shapes: x [R, D], expert_ids [R, K], weight [E * 2 * I, D] -> [P, I].
    """
    parts = Parts.of(weight)
    inner, width = weight.shape[0] // num_experts // 2, x.shape[1]
    out = torch.empty(expert_ids.numel(), inner, dtype=torch.bfloat16, device=expert_ids.device)
    sources = (x.data, x.scales) if isinstance(x, Fp8Tensor) else (x, None)
    _gate_up_kernel[(expert_ids.numel(), triton.cdiv(inner, tile.rows))](
        *sources,
        expert_ids,
        *parts[:3],
        out,
        TOP_K=expert_ids.shape[1],
        NUM_EXPERTS=num_experts,
        WIDTH=width,
        INNER=inner,
        FORMAT=parts.quant_format,
        ACTIVATION=activation.value,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        **overlapping(expert_ids),
    )
    return out


def pair_down(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, weight: QuantizedTensor, num_experts: int, tile: PairTile
) -> Tensor:
    """The weighted sum of every row's experts; with FP8 weights `hidden` is quantised 1 x 128 on its way.

    Shapes: hidden [P, I], expert_ids and weights [R, K], weight [E * D, I] -> [R, D].
    """
    parts = Parts.of(weight)
    num_rows, top_k = expert_ids.shape
    width = weight.shape[0] // num_experts
    out = hidden.new_empty(num_rows, width)
    _down_kernel[(num_rows, triton.cdiv(width, tile.rows))](
        hidden,
        expert_ids,
        weights,
        *parts[:3],
        out,
        TOP_K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        NUM_EXPERTS=num_experts,
        WIDTH=width,
        INNER=hidden.shape[1],
        FORMAT=parts.quant_format,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        num_warps=tile.num_warps,
        **overlapping(expert_ids),
    )
    return out


@triton.constexpr_function
def block_len(quant_format):
    """Elements of a weight's row that share a scale."""
    return {"fp8": 128, "mxfp8": 32, "nvfp4": 16}[quant_format]


@triton.jit
def _gate_up_kernel(
    x,
    x_scales,
    ids,
    weight,
    scales,
    global_scale,
    out,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """silu(gate) * up of one pair, some channels."""
    wait_for_inputs(OVERLAP)
    BLOCKS: tl.constexpr = DEPTH // block_len(FORMAT)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    channel = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = expert * (2 * INNER) + tl.minimum(channel, INNER - 1)
    token = pair // TOP_K + tl.zeros([1], tl.int64)
    gate = tl.zeros([ROWS, BLOCKS], tl.float32)
    up = tl.zeros([ROWS, BLOCKS], tl.float32)
    for k in tl.range(0, WIDTH, DEPTH, loop_unroll_factor=2):
        even, odd = _values(x, x_scales, token, k, WIDTH, FORMAT, BLOCKS, 1)
        gate += _products(even, odd, weight, scales, row, k, WIDTH, FORMAT, BLOCKS)
        up += _products(even, odd, weight, scales, row + INNER, k, WIDTH, FORMAT, BLOCKS)
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if global_scale is not None:
        divisor = tl.load(global_scale)
        gate_sum, up_sum = tl.div_rn(gate_sum, divisor), tl.div_rn(up_sum, divisor)
    hidden = gated(gate_sum, up_sum, ACTIVATION)
    tl.store(out + pair * INNER + channel, hidden.to(out.dtype.element_ty), mask=channel < INNER)


@triton.jit
def _down_kernel(
    hidden,
    ids,
    weights,
    weight,
    scales,
    global_scale,
    out,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The weighted sum of a row's experts, some channels: all experts are read at once, then added one by one."""
    BLOCKS: tl.constexpr = DEPTH // block_len(FORMAT)
    own_row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_BLOCK * ROWS) // ROWS
    expert = tl.load(ids + own_row * TOP_K + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    routed = (expert >= 0) & (expert < NUM_EXPERTS)
    channel = tl.program_id(1) * ROWS + tl.arange(0, K_BLOCK * ROWS) % ROWS
    row = tl.where(routed, expert, 0) * WIDTH + tl.minimum(channel, WIDTH - 1)
    wait_for_inputs(OVERLAP)
    total = tl.zeros([K_BLOCK * ROWS, BLOCKS], tl.float32)
    pair = own_row * TOP_K + tl.minimum(slot, TOP_K - 1)
    for k in tl.range(0, INNER, DEPTH, loop_unroll_factor=2):
        even, odd = _values(hidden, None, pair, k, INNER, FORMAT, BLOCKS, K_BLOCK * ROWS)
        total += _products(even, odd, weight, scales, row, k, INNER, FORMAT, BLOCKS)
    output = tl.sum(total, 1)
    if global_scale is not None:
        output = tl.div_rn(output, tl.load(global_scale))
    output = output.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weights + own_row * TOP_K + slot, mask=routed, other=0.0)
    output = tl.where(routed, output * factor, 0.0)
    result = tl.zeros([ROWS], tl.float32)
    terms = tl.reshape(output, (K_BLOCK, ROWS))
    for k in tl.static_range(TOP_K):
        result += tl.sum(tl.where((tl.arange(0, K_BLOCK) == k)[:, None], terms, 0.0), 0)
    channel = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tl.store(out + own_row * WIDTH + channel, result.to(out.dtype.element_ty), mask=channel < WIDTH)


@triton.jit
def _values(x, x_scales, row, k, DEPTH: tl.constexpr, FORMAT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Columns from k of rows [ROWS], in float32: even and odd ones [ROWS, BLOCKS, 8] for NVFP4, else all, twice."""
    BLOCK: tl.constexpr = block_len(FORMAT)
    block = k // BLOCK + tl.arange(0, BLOCKS)[None, :]
    inside = block < DEPTH // BLOCK
    at = row[:, None, None] * DEPTH + block[:, :, None] * BLOCK
    values = tl.load(x + at + tl.arange(0, BLOCK)[None, None, :], mask=inside[:, :, None], other=0.0)
    if FORMAT == "nvfp4":
        pairs = tl.reshape(values.to(tl.float32), (ROWS, BLOCKS, 8, 2))
        even, odd = tl.split(pairs)
    elif FORMAT == "mxfp8":
        even = values.to(tl.float32)
        odd = even
    else:
        if x_scales is None:
            encoded, scale = encode_fp8_blocks(tl.reshape(values, (ROWS * BLOCKS, BLOCK)))
            values, scale = tl.reshape(encoded, (ROWS, BLOCKS, BLOCK)), tl.reshape(scale, (ROWS, BLOCKS))
        else:
            scale = tl.load(x_scales + row[:, None] * (DEPTH // BLOCK) + block, mask=inside, other=0.0)
        even = values.to(tl.float32) * scale[:, :, None]
        odd = even
    return even, odd


@triton.jit
def _products(even, odd, weight, scales, row, k, DEPTH: tl.constexpr, FORMAT: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums over the blocks from column k of rows [ROWS] of the weight: [ROWS, BLOCKS]."""
    BLOCK: tl.constexpr = block_len(FORMAT)
    BYTES: tl.constexpr = 8 if FORMAT == "nvfp4" else BLOCK
    block = k // BLOCK + tl.arange(0, BLOCKS)[None, :]
    inside = block < DEPTH // BLOCK
    number = row[:, None] * (DEPTH // BLOCK) + block
    at = weight + number[:, :, None] * BYTES + tl.arange(0, BYTES)[None, None, :]
    if FORMAT == "fp8":
        codes = tl.load(at, mask=inside[:, :, None], other=0.0)
        scale = tl.load(scales + row[:, None] // 128 * (DEPTH // 128) + block, mask=inside, other=0.0)
        sums = tl.sum(codes.to(tl.float32) * even, 2)
    elif FORMAT == "mxfp8":
        codes = tl.load(at, mask=inside[:, :, None], other=0.0)
        scale = ue8m0_value(tl.load(scales + number, mask=inside, other=0))
        sums = tl.sum(codes.to(tl.float32) * even, 2)
    else:
        codes = tl.load(at, mask=inside[:, :, None], other=0)
        scale = tl.load(scales + number, mask=inside, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32) * 64.0
        low, high = spread_e2m1(codes)
        sums = tl.sum(low.to(tl.float32) * even + high.to(tl.float32) * odd, 2)
    return sums * scale
