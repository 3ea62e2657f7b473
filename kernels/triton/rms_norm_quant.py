"""RMSNorm and quantisation as one Triton kernel; the contract stands in kernels/rms_norm_quant.py.

The norm is computed as in rms_norm.py: the same tile, warps, loads and order of additions, so the same bytes. Gains are
loaded when they are needed: then a thread has few enough registers for four programs on a multiprocessor. Programs
beyond those of the rows zero the scales of invented rows.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.carriers import Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.triton import number_formats
from dist_infer.kernels.triton.dependent_launch import overlapping
from dist_infer.kernels.triton.quantize import kernel_format
from dist_infer.kernels.triton.quantized_rows import load_scale, rounded, store_row_in_place
from dist_infer.kernels.triton.rms_norm import aligned_rows, row_scale, tile_of


@triton.jit
def norm_and_quantize(
    x,
    residual,
    weight,
    normed,
    total,
    data,
    scales,
    scale,
    num_tokens,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if row < num_tokens:
        columns = tl.arange(0, TILE)
        inside = columns < HIDDEN
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0)
        if residual is not None:
            added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0)
            values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
            tl.store(total + row * HIDDEN + columns, values, mask=inside)
        wide = values.to(tl.float32)
        inverse = row_scale(wide, eps, HIDDEN)
        gains = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
        result = wide * inverse * gains
        if normed is not None:
            tl.store(normed + row * HIDDEN + columns, result.to(values.dtype), mask=inside)
        store_row_in_place(rounded(result, values.dtype), row, data, scales, load_scale(scale), HIDDEN, FORMAT, TILE)
    else:
        number_formats.zero_invented_rows(scales, num_tokens, row.to(tl.int32) - num_tokens, HIDDEN, FORMAT)


def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: QuantizedTensor, with_norm: bool
) -> tuple[Tensor | None, Tensor]:
    """See `dist_infer.kernels.rms_norm_quant.rms_norm_quant`."""
    num_tokens, hidden = x.shape
    normed = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device) if with_norm else None
    total = x if residual is None else torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    x, residual = aligned_rows(x), None if residual is None else aligned_rows(residual)
    if num_tokens == 0:
        return normed, total
    quant_format, block, swizzled = kernel_format(out)
    num_zeroing = number_formats.num_zeroing_programs(num_tokens, hidden // block, swizzled=swizzled)
    scale = out.global_scale if isinstance(out, Nvfp4Tensor) else None
    if quant_format == "fp8":
        scale = out.scales
    tile, num_warps = tile_of(hidden)
    norm_and_quantize[(num_tokens + num_zeroing,)](
        x,
        residual,
        weight,
        normed,
        total,
        out.data,
        out.scales,
        scale,
        num_tokens,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        HIDDEN=hidden,
        TILE=tile,
        FORMAT=quant_format,
        num_warps=num_warps,
        **overlapping(x),
    )
    return normed, total
