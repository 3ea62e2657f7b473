"""Products with quantised weights in Triton; the contract stands in kernels/scaled_linear.py.

The weight is the left operand, so that its rows fill the matrix units however few the tokens are; weight_tiles.py says
how MXFP8 and NVFP4 become one.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.carriers import Fp8Tensor, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.triton import weight_tiles
from dist_infer.kernels.triton.dependent_launch import overlapping

TILE_K = 128
FEW_TOKENS = 64  # up to here K is split, so that there are enough programs
_PROGRAMS = 3 * 132  # that work at a time on an H200
_MIN_TILES = 8  # of K that are worth a program
_ADDED = 1024  # elements of a program of `add_splits`


@triton.jit
def multiply_dequantized(
    x,
    data,
    scales,
    global_scale,
    bias,
    out,
    num_tokens,
    num_outputs,
    x_stride,
    tiles_per_split,
    K: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
    num_stages: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of outputs; with several splits of K its float32 part, for `add_splits`. `data` are int16."""
    PACKED: tl.constexpr = 4 if FORMAT == "nvfp4" else 2  # codes of an int16
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    token = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    split = tl.program_id(2)
    is_output, is_token = output < num_outputs, token < num_tokens
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None]  # of the weight; those beyond are not stored
    column, half, block = tl.arange(0, TILE_K), tl.arange(0, TILE_K // PACKED), tl.arange(0, TILE_K // BLOCK)
    x_at = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    data_at = data + row * (K // PACKED) + half[None, :]
    scales_at = scales + row * (K // BLOCK) + block[None, :]
    sums = tl.zeros((TILE_N, TILE_T), tl.float32)
    last = tl.minimum(split * tiles_per_split + tiles_per_split, (K + TILE_K - 1) // TILE_K)
    if OVERLAP:
        gdc_wait()
    for tile in tl.range(split * tiles_per_split, last, num_stages=num_stages):
        first = tile * TILE_K  # so the compiler knows what divides it
        if K % TILE_K == 0:
            halves = tl.load(data_at + first // PACKED)
            scale = tl.load(scales_at + first // BLOCK)
            values = tl.load(x_at + first, mask=is_token[:, None], other=0.0)
        else:
            halves = tl.load(data_at + first // PACKED, mask=(first // PACKED + half < K // PACKED)[None, :], other=0)
            scale = tl.load(scales_at + first // BLOCK, mask=(first // BLOCK + block < K // BLOCK)[None, :], other=0)
            values = tl.load(x_at + first, mask=is_token[:, None] & (first + column < K)[None, :], other=0.0)
        if FORMAT == "nvfp4":
            weight = weight_tiles.nvfp4_tile(halves, scale, TILE_N, TILE_K)
        else:
            weight = weight_tiles.mxfp8_tile(halves, scale, TILE_N, TILE_K)
        values = weight_tiles.in_order(values, TILE_T, TILE_K, FORMAT)
        sums = tl.dot(weight, tl.trans(values), sums)
    if FORMAT == "nvfp4":
        sums *= 1 / weight_tiles.NVFP4_UNIT
    if OVERLAP:
        gdc_launch_dependents()
    at = token.to(tl.int64)[None, :] * num_outputs + output[:, None]
    inside = is_output[:, None] & is_token[None, :]
    if IS_SPLIT:
        tl.store(out + split.to(tl.int64) * num_tokens * num_outputs + at, sums, mask=inside)
    else:
        if global_scale is not None:
            sums = tl.div_rn(sums, tl.load(global_scale))
        if bias is not None:
            sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_splits(
    parts,
    global_scale,
    bias,
    out,
    num_elements,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The parts of `multiply_dequantized` in order of the splits."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < num_elements
    sums = tl.zeros((ELEMENTS,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        sums += tl.load(parts + split * num_elements.to(tl.int64) + at, mask=inside, other=0.0)
    if global_scale is not None:
        sums = tl.div_rn(sums, tl.load(global_scale))
    if bias is not None:
        sums += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_fp8_blocks(
    x,
    x_scales,
    weight,
    weight_scales,
    bias,
    out,
    num_tokens,
    num_outputs,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    GROUP: tl.constexpr,
    num_stages: tl.constexpr,
):
    """A tile of outputs. Products of 128 inputs are added up in the matrix unit, their sums in float32 registers."""
    # programs of GROUP token tiles take the same weights after one another
    tiles_t, tiles_n = tl.cdiv(num_tokens, TILE_T), tl.cdiv(num_outputs, TILE_N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    group_size = min(tiles_t - group * GROUP, GROUP)
    within_group = tl.program_id(0) % (GROUP * tiles_n)
    output = (within_group // group_size) * TILE_N + tl.arange(0, TILE_N)
    token = (group * GROUP + within_group % group_size) * TILE_T + tl.arange(0, TILE_T)
    is_output, is_token = output < num_outputs, token < num_tokens
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    input_row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    column = tl.arange(0, 128)
    weight_at = weight + row[:, None] * K + column[None, :]
    x_at = x + input_row[None, :] * K + column[:, None]
    sums = tl.zeros((TILE_N, TILE_T), tl.float32)
    for block in tl.range(0, K // 128, num_stages=num_stages):
        part = tl.dot(tl.load(weight_at + block * 128), tl.load(x_at + block * 128))
        weight_scale = tl.load(weight_scales + row // 128 * (K // 128) + block)
        x_scale = tl.load(x_scales + input_row * (K // 128) + block)
        sums += part * (weight_scale[:, None] * x_scale[None, :])
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=is_output[:, None] & is_token[None, :])


def dequantized_linear(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `dist_infer.kernels.scaled_linear.scaled_linear`: MXFP8 and NVFP4 weights."""
    if isinstance(x, Fp8Tensor) or isinstance(weight, Fp8Tensor):
        raise TypeError("dequantized_linear takes an x that isn't quantised, and no FP8 weight")
    (num_outputs, width), num_tokens = weight.shape, x.shape[0]
    out = torch.empty(num_tokens, num_outputs, dtype=out_dtype, device=x.device)
    if num_tokens == 0 or num_outputs == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    global_scale = weight.global_scale if isinstance(weight, Nvfp4Tensor) else None
    plan = plan_tiles(num_tokens, num_outputs, width)
    parts = out if plan.num_splits == 1 else torch.empty(plan.num_splits, num_tokens, num_outputs, device=x.device)
    grid = (triton.cdiv(num_outputs, plan.tile_n), triton.cdiv(num_tokens, plan.tile_t), plan.num_splits)
    multiply_dequantized[grid](
        x,
        weight.data.view(torch.int16),
        weight.scales,
        global_scale,
        bias,
        parts,
        num_tokens,
        num_outputs,
        x.stride(0),
        plan.tiles_per_split,
        K=width,
        IS_SPLIT=plan.num_splits > 1,
        FORMAT="nvfp4" if isinstance(weight, Nvfp4Tensor) else "mxfp8",
        TILE_N=plan.tile_n,
        TILE_T=plan.tile_t,
        TILE_K=TILE_K,
        num_stages=plan.num_stages,
        num_warps=plan.num_warps,
        **overlapping(x),
    )
    if plan.num_splits > 1:
        add_splits[(triton.cdiv(out.numel(), _ADDED),)](
            parts,
            global_scale,
            bias,
            out,
            out.numel(),
            num_outputs,
            NUM_SPLITS=plan.num_splits,
            ELEMENTS=_ADDED,
            **overlapping(x),
        )
    return out


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Outputs and tokens of a tile, tiles of K that a program adds up, programs that share K, launch options."""

    tile_n: int
    tile_t: int
    tiles_per_split: int
    num_splits: int
    num_warps: int
    num_stages: int


def plan_tiles(num_tokens: int, num_outputs: int, width: int) -> TilePlan:
    """How a product is shared out.

    Up to `FEW_TOKENS` the parts of K depend on the weight's shape alone, so that a token's sums are added up in the
    same order in any company.
    """
    tile_t = min(128, max(16, triton.next_power_of_2(num_tokens)))
    tile_n, num_warps, num_stages = (64, 4, 4) if tile_t <= 16 else (128, 8, 4 if tile_t <= 64 else 3)
    num_tiles = triton.cdiv(width, TILE_K)
    wanted = max(1, min(round(_PROGRAMS / triton.cdiv(num_outputs, 64)), num_tiles // _MIN_TILES))
    tiles_per_split = triton.cdiv(num_tiles, wanted) if num_tokens <= FEW_TOKENS else num_tiles
    return TilePlan(tile_n, tile_t, tiles_per_split, triton.cdiv(num_tiles, tiles_per_split), num_warps, num_stages)


def block_linear(x: Tensor | Fp8Tensor, weight: QuantizedTensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See `dist_infer.kernels.scaled_linear.scaled_linear`: FP8 of 1 x 128 and 128 x 128."""
    if not isinstance(x, Fp8Tensor) or not isinstance(weight, Fp8Tensor):
        raise TypeError(f"block_linear multiplies FP8 by FP8, not {type(x).__name__} by {type(weight).__name__}")
    (num_tokens, width), num_outputs = x.shape, weight.shape[0]
    out = torch.empty(num_tokens, num_outputs, dtype=out_dtype, device=x.data.device)
    if num_tokens == 0 or num_outputs == 0:
        return out
    tile_t = min(128, max(16, triton.next_power_of_2(num_tokens)))
    tile_n = 128 if num_tokens > 64 else 64
    multiply_fp8_blocks[(triton.cdiv(num_tokens, tile_t) * triton.cdiv(num_outputs, tile_n),)](
        x.data,
        x.scales,
        weight.data,
        weight.scales,
        bias,
        out,
        num_tokens,
        num_outputs,
        K=width,
        TILE_N=tile_n,
        TILE_T=tile_t,
        GROUP=16,
        num_stages=4,
        num_warps=8 if tile_t == 128 else 4,
    )
    return out
