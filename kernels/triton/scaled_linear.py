"""Products of FP8 by FP8 with scales of blocks in Triton; the contract stands in kernels/scaled_linear.py.

The weight is the left operand, so that its rows fill the matrix units however few the tokens are. With many tokens
cuBLAS, which has such products on Hopper, is up to three times as fast.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.carriers import Fp8Tensor, QuantizedTensor
from dist_infer.kernels.prepared_weight import PreparedWeight

MAX_FEW = 64  # tokens
_CUBLAS_ROWS = 16  # of an input: a multiple
_FIRST_CUDA = (12, 9)  # whose cuBLAS has scales of blocks


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
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `dist_infer.kernels.scaled_linear.scaled_linear`: FP8 of 1 x 128 and 128 x 128."""
    if not isinstance(x, Fp8Tensor) or not isinstance(weight, Fp8Tensor):
        raise TypeError(f"block_linear multiplies FP8 by FP8, not {type(x).__name__} by {type(weight).__name__}")
    (num_tokens, width), num_outputs = x.shape, weight.shape[0]
    if num_tokens > MAX_FEW and bias is None and cublas_takes(num_outputs, width, x.data.device):
        return _cublas_linear(x, weight, out_dtype)
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


def cublas_takes(num_outputs: int, width: int, device: torch.device) -> bool:
    """Whether cuBLAS multiplies by such a weight there: its scales want a multiple of four in a row."""
    return num_outputs > 0 and num_outputs % 16 == 0 and width % 512 == 0 and _has_block_scales(device)


@cache
def _has_block_scales(device: torch.device) -> bool:
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    return device.type == "cuda" and cuda >= _FIRST_CUDA and torch.cuda.get_device_capability(device) == (9, 0)


def _cublas_linear(x: Fp8Tensor, weight: Fp8Tensor, out_dtype: torch.dtype) -> Tensor:
    num_tokens = x.shape[0]
    missing = -num_tokens % _CUBLAS_ROWS
    data, scales = x.data, x.scales
    if missing:
        data = functional.pad(data.view(torch.uint8), (0, 0, 0, missing)).view(data.dtype)
        scales = functional.pad(scales, (0, 0, 0, missing))
    by_column = scales.t().contiguous().t()
    out: Tensor = torch._scaled_mm(data, weight.data.t(), by_column, weight.scales.t(), out_dtype=out_dtype)
    return out[:num_tokens]
