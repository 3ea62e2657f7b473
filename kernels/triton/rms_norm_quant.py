"""RMSNorm and quantisation as one Triton kernel; the contract stands in kernels/rms_norm_quant.py.

The norm is computed as in rms_norm.py: the same tile, loads and order of additions, so the same bytes. Half of the
warps share a row, though: to quantise is arithmetic, of which much is the same for all values of a thread. Programs
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
from dist_infer.kernels.triton.float_pairs import widened
from dist_infer.kernels.triton.quantize import kernel_format
from dist_infer.kernels.triton.quantized_rows import load_scale, store_row_in_place
from dist_infer.kernels.triton.rms_norm import aligned_rows, row_scale_in_half, tile_of


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
    NUM_WARPS: tl.constexpr,
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
        gains = tl.load(weight + columns, mask=inside, other=0)
        given_scale = load_scale(scale)
        if residual is not None:
            values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
            tl.store(total + row * HIDDEN + columns, values, mask=inside)
        wide = widened(values)
        VECTOR: tl.constexpr = 128 // values.dtype.primitive_bitwidth
        inverse = row_scale_in_half(wide, eps, HIDDEN, NUM_WARPS, VECTOR)
        result = wide * inverse * widened(gains)
        if normed is not None:
            tl.store(normed + row * HIDDEN + columns, result.to(values.dtype), mask=inside)
        store_row_in_place(result, row, data, scales, given_scale, HIDDEN, FORMAT, TILE, values.dtype)
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
        NUM_WARPS=num_warps,
        num_warps=max(1, num_warps // 2),
        **overlapping(x),
    )
    return normed, total
