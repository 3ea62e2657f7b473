"""Products of many tokens with packed weights: these are dequantised for cuBLAS, some rows at a time."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.packed_weight import ROWS, PackedWeight
from dist_infer.kernels.triton.packed_tiles import part_pairs, words_and_scales

_CHUNK_ELEMENTS = 2**25  # of a weight and of sums, at most, that there are at a time
_WARPS = 4
_COLUMNS = 1024  # of a program of `finish`


@triton.jit
def dequantize_packed(
    data,
    scales,
    out,
    first_group,
    num_rows,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Rows of 16 groups' tiles as bfloat16 in their places, by words of two; NVFP4 as `multiply_packed` adds it up."""
    THREADS: tl.constexpr = WARPS * 32
    COLUMNS: tl.constexpr = 128 if FORMAT == "nvfp4" else 64
    SCALE_WORDS: tl.constexpr = 32 if FORMAT == "nvfp4" else 8
    thread = tl.arange(0, THREADS)
    g, c = thread % 32 // 4, thread % 4
    vector = tl.arange(0, 4)
    tile = tl.program_id(1) * WARPS + thread // 32
    at_tile = (first_group + tl.program_id(0)).to(tl.int64) * TILES + tl.minimum(tile, TILES - 1)
    data_at = data + at_tile[:, None] * 256 + thread[:, None] % 32 * 4 + vector[None, :]
    if FORMAT == "nvfp4":
        own_scales = tl.load(scales + at_tile[:, None] * SCALE_WORDS + g[:, None] * 4 + vector[None, :])
    else:
        own_scales = tl.load(scales + at_tile * SCALE_WORDS + g)
    loaded = (tl.load(data_at), tl.load(data_at + 128), own_scales)
    held = words_and_scales(loaded, tl.where(c // 2 == 0, 0x6420, 0x7531), FORMAT, THREADS)
    for part in tl.static_range(COLUMNS // 32):
        column = tile * COLUMNS + part * 32 + c * 8
        for half in tl.static_range(2):
            row = tl.program_id(0) * 16 + half * 8 + g
            pairs = part_pairs(held[half], held[2 + half], part, FORMAT)
            words = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
            at = row.to(tl.int64) * (WIDTH // 2) + column // 2
            inside = (row < num_rows) & (column < WIDTH)
            tl.store(out + at[:, None] + vector[None, :], tl.reshape(words, (THREADS, 4)), mask=inside[:, None])


@triton.jit
def finish(sums, global_scale, bias, out, num_columns, out_stride, FACTOR: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 sums [T, num_columns] into columns of the result."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    total = tl.load(sums + row * num_columns + column, mask=inside, other=0.0) * FACTOR
    if global_scale is not None:
        total = tl.div_rn(total, tl.load(global_scale))
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


def dequantize(weight: PackedWeight, first: int, out: Tensor) -> None:
    """Rows from `first` on, which 16 divides, as many as `out` has; NVFP4 as `multiply_packed` adds it up."""
    dequantize_packed[(triton.cdiv(out.shape[0], ROWS), triton.cdiv(weight.tiles_across, _WARPS))](
        weight.data,
        weight.scales,
        out.view(torch.int32),
        first // ROWS,
        out.shape[0],
        TILES=weight.tiles_across,
        WIDTH=out.shape[1],
        FORMAT="nvfp4" if weight.is_nvfp4 else "mxfp8",
        WARPS=_WARPS,
        num_warps=_WARPS,
    )


def multiply_many(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """The product of any number of tokens, by cuBLAS in float32 sums."""
    (num_outputs, width), num_tokens = weight.shape, x.shape[0]
    rows_at_a_time = max(ROWS, _CHUNK_ELEMENTS // max(width, num_tokens) // ROWS * ROWS)
    for first in range(0, num_outputs, rows_at_a_time):
        num_rows = min(rows_at_a_time, num_outputs - first)
        wide = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
        dequantize(weight, first, wide)
        sums = torch.mm(x, wide.t(), out_dtype=torch.float32)
        finish[(num_tokens, triton.cdiv(num_rows, _COLUMNS))](
            sums,
            weight.global_scale,
            None if bias is None else bias[first : first + num_rows],
            out[:, first:],
            num_rows,
            out.stride(0),
            FACTOR=2.0**9 if weight.is_nvfp4 else 1.0,
            COLUMNS=_COLUMNS,
        )
