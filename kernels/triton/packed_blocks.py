"""Products of some tokens with packed weights: 64 rows and more at a time through shared memory and whole warpgroups.

A packed tile is a matrix of 16 rows by 64 bytes, and the pairs that masks bring out of its words are what a warpgroup's
matrix units want of the weight as the left operand, if the inputs change places as `in_order` has it.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.packed_weight import ROWS, PackedWeight
from dist_infer.kernels.triton.dependent_launch import overlapping
from dist_infer.kernels.triton.packed_sums import add_splits_into
from dist_infer.kernels.triton.weight_tiles import e2m1_pairs, e4m3_pairs, nvfp4_factors, ue8m0_factors

COLUMNS = 128  # of a step
_PROGRAMS = 8 * 132  # twice as many as work at a time on an H200
_MIN_STEPS = 8  # that are worth a program


@triton.jit
def in_order(x, TOKENS: tl.constexpr, STEP: tl.constexpr):
    """Inputs [TOKENS, STEP] in the order of the weights: 32 columns, then pairs, then threads."""
    fields = tl.permute(tl.reshape(x, (TOKENS, STEP // 32, 4, 2, 2, 2)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(fields, (TOKENS, STEP))


@triton.jit
def multiply_blocks(
    x,
    data,
    scales,
    global_scale,
    bias,
    out,
    num_tokens,
    num_outputs,
    x_stride,
    num_groups,
    num_tiles,
    steps_per_split,
    IS_SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    num_stages: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """TILE_N outputs of TILE_T tokens; with several splits of K the float32 part. x holds whole steps; data int16."""
    STEP: tl.constexpr = 128
    TILES: tl.constexpr = 1 if FORMAT == "nvfp4" else 2  # of a step
    HALVES: tl.constexpr = 32 * TILES
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    token = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    split = tl.program_id(2)
    is_token = (token < num_tokens)[:, None]
    group = tl.minimum(output // 16, num_groups - 1).to(tl.int64) * num_tiles
    half = tl.arange(0, HALVES)
    data_at = data + group[:, None] * 512 + (half // 32 * 512 + half % 32)[None, :] + (output % 16)[:, None] * 32
    x_at = x + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, STEP)[None, :]
    if FORMAT == "nvfp4":
        scales_at = scales + group[:, None] * 128 + (output % 8 * 16 + output // 8 % 2 * 8)[:, None]
        scales_at += tl.arange(0, 8)[None, :]
    else:
        word = tl.arange(0, 16)  # tile, g: the scales of rows g and g + 8
        first = tl.minimum(tl.program_id(0) * (TILE_N // 16) + tl.arange(0, TILE_N // 16), num_groups - 1)
        scales_at = scales + (first.to(tl.int64) * num_tiles)[:, None] * 8 + word[None, :]
    sums = tl.zeros((TILE_N, TILE_T), tl.float32)
    last = tl.minimum(split * steps_per_split + steps_per_split, num_tiles // TILES)
    if OVERLAP:
        gdc_wait()
    for step in tl.range(split * steps_per_split, last, num_stages=num_stages):
        halves = tl.load(data_at + step * (TILES * 512))
        values = tl.load(x_at + step * STEP, mask=is_token, other=0.0)
        if FORMAT == "nvfp4":
            factors = nvfp4_factors(tl.load(scales_at + step * 128))
            factors = tl.permute(tl.reshape(factors, (TILE_N, 4, 2)), (0, 2, 1))  # half of the threads, 32 columns
            factors = tl.broadcast_to(factors[:, :, None, :, None], (TILE_N, 2, 2, 4, 2))
            p0, p1, p2, p3 = e2m1_pairs(halves, tl.reshape(factors, (TILE_N, 32)))
            codes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
            fields = tl.permute(tl.reshape(codes, (TILE_N, 4, 4, 2, 2, 2)), (0, 2, 4, 5, 1, 3))
        else:
            words = tl.load(scales_at + step * 16)
            upper = tl.join(words & 0xFF, (words >> 8) & 0xFF)
            lower = tl.join((words >> 16) & 0xFF, (words >> 24) & 0xFF)
            by_row = tl.reshape(tl.join(upper, lower), (TILE_N // 16, 2, 8, 2, 2))  # group, tile, g, block, half
            factors = ue8m0_factors(tl.reshape(tl.permute(by_row, (0, 4, 2, 1, 3)), (TILE_N, 2, 2)))
            factors = tl.broadcast_to(factors[:, :, None, :, None], (TILE_N, 2, 4, 2, 4))
            p0, p1 = e4m3_pairs(halves, tl.reshape(factors, (TILE_N, 64)))
            codes = tl.reshape(tl.join(p0, p1), (TILE_N, 2, 4, 4, 2, 2))  # tile, thread, word, half, pair
            fields = tl.permute(codes, (0, 1, 3, 5, 2, 4))
        weight = tl.reshape(fields, (TILE_N, STEP))
        sums = tl.dot(weight, tl.trans(in_order(values, TILE_T, STEP)), sums)
    if FORMAT == "nvfp4":
        sums *= 512.0
    if OVERLAP:
        gdc_launch_dependents()
    at = token.to(tl.int64)[None, :] * num_outputs + output[:, None]
    inside = (output < num_outputs)[:, None] & (token < num_tokens)[None, :]
    if IS_SPLIT:
        tl.store(out + split.to(tl.int64) * num_tokens * num_outputs + at, sums, mask=inside)
    else:
        if global_scale is not None:
            sums = tl.div_rn(sums, tl.load(global_scale))
        if bias is not None:
            sums += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def multiply_some(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """The product of up to 64 tokens; x in rows on 16 bytes, as wide as the tiles.

    How K is split depends on the weight alone: a token's sums are added up so in any company.
    """
    num_tokens, num_outputs = out.shape
    num_steps = weight.tiles_across * weight.columns // COLUMNS
    wanted = max(1, min(round(_PROGRAMS / triton.cdiv(num_outputs, 64)), num_steps // _MIN_STEPS))
    steps_per_split = triton.cdiv(num_steps, wanted)
    num_splits = triton.cdiv(num_steps, steps_per_split)
    parts = out if num_splits == 1 else torch.empty(num_splits, num_tokens, num_outputs, device=x.device)
    tile_t = max(16, triton.next_power_of_2(num_tokens))
    tile_n, num_warps = (64, 4) if tile_t <= 32 else (128, 8)
    multiply_blocks[(triton.cdiv(num_outputs, tile_n), triton.cdiv(num_tokens, tile_t), num_splits)](
        x,
        weight.data.view(torch.int16),
        weight.scales.view(torch.uint8) if weight.is_nvfp4 else weight.scales,
        weight.global_scale,
        bias,
        parts,
        num_tokens,
        num_outputs,
        x.stride(0),
        triton.cdiv(num_outputs, ROWS),
        weight.tiles_across,
        steps_per_split,
        IS_SPLIT=num_splits > 1,
        FORMAT="nvfp4" if weight.is_nvfp4 else "mxfp8",
        TILE_N=tile_n,
        TILE_T=tile_t,
        num_stages=4,
        num_warps=num_warps,
        **overlapping(x),
    )
    if num_splits > 1:
        add_splits_into(parts, weight.global_scale, bias, out)
