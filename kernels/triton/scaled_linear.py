"""Products with quantised weights in Triton; the contract stands in kernels/scaled_linear.py.

The weight is the left operand, so that its rows fill the matrix units however few the tokens are. A matrix unit wants
of a row, from each of four threads, the elements 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of every 16: single bytes or less of
a quantised weight. The products of a step may be added up in any order, so the inputs of MXFP8 change places: thread c
takes TILE_K / 4 neighbours of the weight, which lie in words, and `in_threads` moves the activations accordingly.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Tensor, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.triton.number_formats import decode_nvfp4, ue8m0_value

_TILE_K = 128
_FEW_TOKENS = 64  # up to here K is split, so that there are enough programs
_PROGRAMS = 6 * 132  # that work at a time on an H200, or more


@triton.jit
def in_threads(matrix, ROWS: tl.constexpr, TILE_K: tl.constexpr):
    """Column TILE_K / 4 c + 4 j + 2 h + e of a matrix in any shape as column 16 j + 8 h + 2 c + e of [ROWS, TILE_K]."""
    fields = tl.permute(tl.reshape(matrix, (ROWS, 4, TILE_K // 16, 2, 2)), (0, 2, 3, 1, 4))
    return tl.reshape(fields, (ROWS, TILE_K))


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
    K: tl.constexpr,
    K_SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_K: tl.constexpr,
    num_stages: tl.constexpr,
):
    """A tile of outputs; with several splits of K its float32 part, for `add_splits`."""
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    token = tl.program_id(1) * TILE_T + tl.arange(0, TILE_T)
    split = tl.program_id(2)
    is_output, is_token = output < num_outputs, token < num_tokens
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)  # of the weight; those beyond are not stored
    sums = tl.zeros((TILE_N, TILE_T), tl.float32)
    for first in tl.range(split * K_SPLIT, min(split * K_SPLIT + K_SPLIT, K), TILE_K, num_stages=num_stages):
        column = first + tl.arange(0, TILE_K)
        within = column < K
        values = tl.load(
            x + token.to(tl.int64)[None, :] * x_stride + column[:, None],
            mask=is_token[None, :] & within[:, None],
            other=0.0,
        )
        if FORMAT == "nvfp4":
            byte = first // 2 + tl.arange(0, TILE_K // 2)
            block = first // 16 + tl.arange(0, TILE_K // 16)
            codes = tl.load(data + row[:, None] * (K // 2) + byte[None, :], mask=byte[None, :] < K // 2, other=0)
            scale = tl.load(scales + row[:, None] * (K // 16) + block[None, :], mask=block[None, :] < K // 16, other=0)
            weight = decode_nvfp4(codes, scale, TILE_N, TILE_K, tl.bfloat16)
        elif FORMAT == "mxfp8":
            block = first // 32 + tl.arange(0, TILE_K // 32)
            codes = tl.load(data + row[:, None] * K + column[None, :], mask=within[None, :], other=0.0)
            scale = tl.load(scales + row[:, None] * (K // 32) + block[None, :], mask=block[None, :] < K // 32, other=0)
            scale = ue8m0_value(scale)
            codes = tl.reshape(codes, (TILE_N, TILE_K // 32, 32))
            weight = (codes.to(tl.float32) * scale[:, :, None]).to(tl.bfloat16)
        else:
            weight = tl.load(data + row[:, None] * K + column[None, :], mask=within[None, :], other=0.0)
        if not IN_PLACE:
            weight = in_threads(weight, TILE_N, TILE_K)
            values = tl.trans(in_threads(tl.trans(values), TILE_T, TILE_K))
        sums = tl.dot(weight, values, sums, input_precision="ieee")
    at = token.to(tl.int64)[None, :] * num_outputs + output[:, None]
    inside = is_output[:, None] & is_token[None, :]
    if K_SPLIT < K:
        tl.store(out + split.to(tl.int64) * num_tokens * num_outputs + at, sums, mask=inside)
    else:
        if global_scale is not None:
            sums = tl.div_rn(sums, tl.load(global_scale))
        if bias is not None:
            sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_splits(
    parts, global_scale, bias, out, num_elements, num_outputs, NUM_SPLITS: tl.constexpr, ELEMENTS: tl.constexpr
):
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
    name = "nvfp4" if isinstance(weight, Nvfp4Tensor) else "mxfp8"
    global_scale = weight.global_scale if isinstance(weight, Nvfp4Tensor) else None
    return multiply(x, weight.data, weight.scales, global_scale, bias, weight.shape, name, in_place=name == "nvfp4")


def multiply(
    x: Tensor,
    data: Tensor,
    scales: Tensor | None,
    global_scale: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, int],
    quant_format: str,
    *,
    in_place: bool,
) -> Tensor:
    """The product with a weight in `quant_format`, or as it is for "none"; `in_place`: inputs keep their order."""
    num_outputs, width = shape
    num_tokens = x.shape[0]
    out = torch.empty(num_tokens, num_outputs, dtype=x.dtype, device=x.device)
    if num_tokens == 0 or num_outputs == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tile_t = min(128, max(16, triton.next_power_of_2(num_tokens)))
    # more tokens are read again by fewer programs
    tile_n, num_warps, num_stages = (64, 4, 4 if tile_t <= 64 else 3) if in_place or tile_t <= 16 else (128, 8, 3)
    split_len = split_of(num_outputs, width) if num_tokens <= _FEW_TOKENS else width
    num_splits = triton.cdiv(width, split_len)
    parts = out if num_splits == 1 else torch.empty(num_splits, num_tokens, num_outputs, device=x.device)
    multiply_dequantized[(triton.cdiv(num_outputs, tile_n), triton.cdiv(num_tokens, tile_t), num_splits)](
        x,
        data,
        scales,
        global_scale,
        bias,
        parts,
        num_tokens,
        num_outputs,
        x.stride(0),
        K=width,
        K_SPLIT=split_len if num_splits > 1 else width,
        FORMAT=quant_format,
        IN_PLACE=in_place,
        TILE_N=tile_n,
        TILE_T=tile_t,
        TILE_K=_TILE_K,
        num_stages=num_stages,
        num_warps=num_warps,
    )
    if num_splits > 1:
        grid = (triton.cdiv(out.numel(), 1024),)
        add_splits[grid](parts, global_scale, bias, out, out.numel(), num_outputs, NUM_SPLITS=num_splits, ELEMENTS=1024)
    return out


def split_of(num_outputs: int, width: int) -> int:
    """Inputs that a program adds up, at least a thousand: a function of the weight's shape alone.

    So a token's sums are added up in the same order in any company of up to `_FEW_TOKENS`.
    """
    num_splits: int = max(1, min(round(_PROGRAMS / triton.cdiv(num_outputs, 64)), width // 1024))
    return -(-width // (num_splits * _TILE_K)) * _TILE_K


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
