"""Products of FP8 by FP8 with scales of blocks in Triton; the contract stands in kernels/scaled_linear.py.

The weight is the left operand, so that its rows fill the matrix units however few the tokens are.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Tensor, QuantizedTensor
from dist_infer.kernels.packed_weight import PackedWeight


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


def block_linear(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
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
