"""RMSNorm of channels that several ranks share in Triton; the contract stands in kernels/sharded_rms_norm.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.rms_norm import aligned_rows, tile_of


@triton.jit
def _square_sum(x, out, x_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    values = tl.load(x + row * x_stride + columns, mask=columns < WIDTH, other=0).to(tl.float32)
    tl.store(out + row, tl.sum(values * values, 0))


@triton.jit
def _scale_rows(
    x, square_sums, weight, out, x_stride, sums_stride, num_channels, eps, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    mean = tl.div_rn(tl.load(square_sums + row * sums_stride), num_channels)
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    values = tl.load(x + row * x_stride + columns, mask=inside).to(tl.float32)
    gains = tl.load(weight + columns, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (values * scale * gains).to(out.dtype.element_ty), mask=inside)


def square_sum(x: Tensor) -> Tensor:
    """See `dist_infer.kernels.sharded_rms_norm.square_sum`."""
    num_tokens, width = x.shape
    out = torch.zeros(num_tokens, dtype=torch.float32, device=x.device)
    if x.numel():
        x = aligned_rows(x)
        tile, num_warps = tile_of(width)
        _square_sum[(num_tokens,)](x, out, x.stride(0), WIDTH=width, TILE=tile, num_warps=num_warps)
    return out


def scale_rows(x: Tensor, square_sums: Tensor, num_channels: int, weight: Tensor, eps: float) -> Tensor:
    """See `dist_infer.kernels.sharded_rms_norm.scale_rows`."""
    num_tokens, width = x.shape
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    if out.numel():
        x = aligned_rows(x)
        tile, num_warps = tile_of(width)
        _scale_rows[(num_tokens,)](
            x,
            square_sums,
            weight,
            out,
            x.stride(0),
            square_sums.stride(0),
            float(num_channels),
            eps,
            WIDTH=width,
            TILE=tile,
            num_warps=num_warps,
        )
    return out
