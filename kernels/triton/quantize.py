"""Quantisation in Triton; the contract stands in kernels/quantize.py.

A matrix is a row of blocks, which programs share evenly whatever its width: none spans two rows. Programs beyond those
zero the scales of invented rows.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.reference.quantize import quantize as reference_quantize
from dist_infer.kernels.triton import number_formats

SMALL, LARGE = (1024, 2), (4096, 4)  # elements and warps of a program; a thread takes 16 or 32 elements
LARGE_FROM = 2**22  # elements from which there are enough programs of the large kind


@triton.jit
def quantize_blocks(
    x, data, scales, scale, num_rows, WIDTH: tl.constexpr, FORMAT: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
    program = tl.program_id(0)
    BLOCK: tl.constexpr = number_formats.block_len(FORMAT)
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // BLOCK
    total = num_rows * BLOCKS_PER_ROW
    num_quantizing = tl.cdiv(total, NUM_BLOCKS)
    if program < num_quantizing:
        at = program * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
        is_real = at < total
        first = x + at.to(tl.int64)[:, None] * BLOCK
        if BLOCK == 16:  # a thread takes a block: two loads of 16 bytes, one store of 8
            half = first + tl.arange(0, 8)[None, :]
            low = tl.load(half, mask=is_real[:, None], other=0.0)
            high = tl.load(half + 8, mask=is_real[:, None], other=0.0)
            blocks = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (NUM_BLOCKS, BLOCK))
        else:
            blocks = tl.load(first + tl.arange(0, BLOCK)[None, :], mask=is_real[:, None], other=0.0)
        row, block = at // BLOCKS_PER_ROW, at % BLOCKS_PER_ROW
        number_formats.store_blocks(
            blocks, row.to(tl.int64), block, is_real, data, scales, scale, WIDTH, FORMAT, NUM_BLOCKS
        )
    else:
        number_formats.zero_invented_rows(scales, num_rows, program - num_quantizing, WIDTH, FORMAT)


@triton.jit
def quantize_elements(x, data, scale, total, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    values = tl.load(x + at, mask=at < total, other=0.0)
    tl.store(data + at, number_formats.encode_fp8(values, scale), mask=at < total)


@triton.jit
def reciprocals(x, out, total, ELEMENTS: tl.constexpr):
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    tl.store(out + at, number_formats.reciprocal(tl.load(x + at, mask=at < total, other=1.0)), mask=at < total)


def quantize(x: Tensor, out: QuantizedTensor) -> None:
    """See `dist_infer.kernels.quantize.quantize`."""
    rows, width = out.shape
    elements, num_warps = LARGE if x.numel() >= LARGE_FROM else SMALL
    if isinstance(out, Fp8Tensor) and out.scaling is Fp8Scaling.BLOCKS_128X128:
        reference_quantize(x, out)  # weights, once when they are loaded
    elif isinstance(out, Fp8Tensor) and out.scaling is Fp8Scaling.TENSOR:
        if x.numel():
            grid = (triton.cdiv(x.numel(), elements),)
            quantize_elements[grid](x, out.data, out.scales, x.numel(), ELEMENTS=elements, num_warps=num_warps)
    elif rows:
        name, block, swizzled = kernel_format(out)
        blocks = width // block
        num_blocks = elements // block
        num_programs = triton.cdiv(rows * blocks, num_blocks) + number_formats.num_zeroing_programs(
            rows, blocks, swizzled=swizzled
        )
        scale = out.global_scale if isinstance(out, Nvfp4Tensor) else None
        quantize_blocks[(num_programs,)](
            x,
            out.data,
            out.scales,
            scale,
            rows,
            WIDTH=width,
            FORMAT=name,
            NUM_BLOCKS=num_blocks,
            num_warps=num_warps,
        )


def kernel_format(out: QuantizedTensor) -> tuple[str, int, bool]:
    """FORMAT of the device functions, elements of a block, whether the scales are swizzled (they may be padded)."""
    if isinstance(out, Fp8Tensor):
        return ("fp8" if out.scaling is Fp8Scaling.TENSOR else "fp8_block128"), 128, False
    swizzled = out.layout is ScaleLayout.SWIZZLED_128X4
    name = "nvfp4" if isinstance(out, Nvfp4Tensor) else "mxfp8"
    return (name if swizzled else f"{name}_linear"), out.BLOCK, swizzled


def hardware_reciprocal(x: Tensor) -> Tensor:
    """rcp.approx.ftz of every element: `rcp` of the reference where its bytes shall equal those of a GPU."""
    out = torch.empty_like(x, dtype=torch.float32)
    reciprocals[(triton.cdiv(x.numel(), 1024),)](x.contiguous(), out, x.numel(), ELEMENTS=1024)
    return out
