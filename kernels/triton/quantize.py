"""Quantisation in Triton; the contract stands in kernels/quantize.py.

A matrix is a sequence of blocks, which programs share evenly whatever its width: no block spans two rows. Programs
beyond those zero the scales of invented rows. Many rows with swizzled scales go another way, by `quantize_tiles`.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.reference.quantize import quantize as reference_quantize
from dist_infer.kernels.triton import number_formats
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

ELEMENTS, NUM_WARPS = 2048, 4  # of a program; smaller ones take longer to be started than to run
TILE_BLOCKS = 16  # of each row of a tile
TILES_FROM = 2**22  # elements; fewer rows leave most of a tile empty


@triton.jit
def load_blocks(x, block, is_real, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Blocks number `block` [N] of a matrix without gaps, as [N, BLOCK]."""
    first = x + block.to(tl.int64)[:, None] * BLOCK
    if BLOCK == 16:  # a thread takes a block: two loads of 16 bytes, one store of 8
        half = first + tl.arange(0, 8)[None, :]
        low = tl.load(half, mask=is_real[:, None], other=0.0)
        high = tl.load(half + 8, mask=is_real[:, None], other=0.0)
        blocks = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (NUM_BLOCKS, BLOCK))
    else:
        blocks = tl.load(first + tl.arange(0, BLOCK)[None, :], mask=is_real[:, None], other=0.0)
    return blocks


@triton.jit
def quantize_blocks(
    x,
    data,
    scales,
    scale,
    num_rows,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    program = tl.program_id(0)
    BLOCK: tl.constexpr = number_formats.block_len(FORMAT)
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // BLOCK
    total = num_rows * BLOCKS_PER_ROW
    num_quantizing = tl.cdiv(total, NUM_BLOCKS)
    if program < num_quantizing:
        at = program * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
        is_real = at < total
        blocks = load_blocks(x, at, is_real, BLOCK, NUM_BLOCKS)
        row, block = at // BLOCKS_PER_ROW, at % BLOCKS_PER_ROW
        number_formats.store_blocks(
            blocks, row.to(tl.int64), block, is_real, data, scales, scale, WIDTH, FORMAT, NUM_BLOCKS
        )
    else:
        number_formats.zero_invented_rows(scales, num_rows, program - num_quantizing, WIDTH, FORMAT)


@triton.jit
def quantize_tiles(
    x,
    data,
    scales,
    scale,
    num_rows,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Eight rows whose swizzled scales stand side by side: m and m + 1, and those 32, 64 and 96 below; BLOCKS of each.

    So a program stores whole sectors of 32 scales, zeros for rows that don't exist.
    """
    wait_for_inputs(OVERLAP)
    BLOCK: tl.constexpr = number_formats.block_len(FORMAT)
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // BLOCK
    NUM_BLOCKS: tl.constexpr = 8 * BLOCKS
    PROGRAMS_ACROSS: tl.constexpr = (BLOCKS_PER_ROW + BLOCKS - 1) // BLOCKS
    first_block = tl.program_id(0) % PROGRAMS_ACROSS * BLOCKS
    pair = tl.program_id(0) // PROGRAMS_ACROSS
    row_tile, pair = pair // 16, pair % 16
    at = tl.arange(0, NUM_BLOCKS)
    row = row_tile * 128 + at // (2 * BLOCKS) * 32 + pair * 2 + at // BLOCKS % 2
    block = first_block + at % BLOCKS
    is_real = (row < num_rows) & (block < BLOCKS_PER_ROW)
    number = row * BLOCKS_PER_ROW + block
    blocks = load_blocks(x, number, is_real, BLOCK, NUM_BLOCKS)
    encoded, stored = number_formats.encode(blocks, scale, FORMAT, NUM_BLOCKS)
    number_formats.store_data(encoded, number.to(tl.int64), is_real, data, FORMAT)
    stored = tl.where(row < num_rows, stored, 0)
    ordered = tl.permute(tl.reshape(stored, (4, 2, BLOCKS // 4, 4)), (2, 1, 0, 3))
    tile = row_tile * (BLOCKS_PER_ROW // 4) + first_block // 4 + at // 32
    inside = first_block // 4 + at // 32 < BLOCKS_PER_ROW // 4
    tl.store(scales + tile * 512 + pair * 32 + at % 32, tl.reshape(ordered, (NUM_BLOCKS,)), mask=inside)


@triton.jit
def quantize_elements(x, data, scale, total, ELEMENTS: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    values = tl.load(x + at, mask=at < total, other=0.0)
    tl.store(data + at, number_formats.encode_fp8(values, scale), mask=at < total)


@triton.jit
def quantize_rows(x, data, scales, WIDTH: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    values = tl.load(x + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    number_formats.store_row(values, row, data, scales, None, WIDTH, "fp8_rows", TILE)


@triton.jit
def reciprocals(x, out, total, ELEMENTS: tl.constexpr):
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    tl.store(out + at, number_formats.reciprocal(tl.load(x + at, mask=at < total, other=1.0)), mask=at < total)


def quantize(x: Tensor, out: QuantizedTensor) -> None:
    """See `dist_infer.kernels.quantize.quantize`."""
    rows, width = out.shape
    if isinstance(out, Fp8Tensor) and out.scaling is Fp8Scaling.BLOCKS_128X128:
        reference_quantize(x, out)  # weights, once when they are loaded
        return
    if not rows:
        return
    if isinstance(out, Fp8Tensor) and out.scaling is Fp8Scaling.TENSOR:
        quantize_elements[(triton.cdiv(x.numel(), ELEMENTS),)](
            x, out.data, out.scales, x.numel(), ELEMENTS=ELEMENTS, num_warps=NUM_WARPS, **overlapping(x)
        )
        return
    if isinstance(out, Fp8Tensor) and out.scaling is Fp8Scaling.ROWS:
        tile = triton.next_power_of_2(width)
        num_warps = min(16, max(1, tile // 1024))
        quantize_rows[(rows,)](x, out.data, out.scales, WIDTH=width, TILE=tile, num_warps=num_warps, **overlapping(x))
        return
    name, block, swizzled = kernel_format(out)
    scale = out.global_scale if isinstance(out, Nvfp4Tensor) else None
    if swizzled and x.numel() >= TILES_FROM:
        grid = (triton.cdiv(rows, 128) * 16 * triton.cdiv(width // block, TILE_BLOCKS),)
        num_warps = TILE_BLOCKS * block // 128 if name == "nvfp4" else TILE_BLOCKS * block // 64
        quantize_tiles[grid](
            x,
            out.data,
            out.scales,
            scale,
            rows,
            WIDTH=width,
            FORMAT=name,
            BLOCKS=TILE_BLOCKS,
            num_warps=num_warps,
            **overlapping(x),
        )
        return
    num_blocks = ELEMENTS // block
    num_zeroing = number_formats.num_zeroing_programs(rows, width // block, swizzled=swizzled)
    grid = (triton.cdiv(rows * (width // block), num_blocks) + num_zeroing,)
    quantize_blocks[grid](
        x,
        out.data,
        out.scales,
        scale,
        rows,
        WIDTH=width,
        FORMAT=name,
        NUM_BLOCKS=num_blocks,
        num_warps=NUM_WARPS,
        **overlapping(x),
    )


def kernel_format(out: QuantizedTensor) -> tuple[str, int, bool]:
    """FORMAT of the device functions, elements of a block, whether the scales are swizzled (they may be padded)."""
    if isinstance(out, Fp8Tensor):
        names = {Fp8Scaling.TENSOR: "fp8", Fp8Scaling.ROWS: "fp8_rows"}
        return names.get(out.scaling, "fp8_block128"), 128, False
    swizzled = out.layout is ScaleLayout.SWIZZLED_128X4
    name = "nvfp4" if isinstance(out, Nvfp4Tensor) else "mxfp8"
    return (name if swizzled else f"{name}_linear"), out.BLOCK, swizzled


def hardware_reciprocal(x: Tensor) -> Tensor:
    """rcp.approx.ftz of every element: `rcp` of the reference where its bytes shall equal those of a GPU."""
    out = torch.empty_like(x, dtype=torch.float32)
    reciprocals[(triton.cdiv(x.numel(), ELEMENTS),)](x.contiguous(), out, x.numel(), ELEMENTS=ELEMENTS)
    return out
