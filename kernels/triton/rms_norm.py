"""RMSNorm in Triton; the contract stands in kernels/rms_norm.py.

A row is one tile, so its sum of squares is added in an order that the tile and its layout settle, and these depend on
the width and the dtype alone: not on how many rows there are or where they lie. Whoever
fuses this norm into another kernel and promises the same bytes takes `tile_of`, `row_scale` and 16-byte loads too, or
`row_scale_in_half` and half of the warps.

Two or four programs may share a row, each with every second or fourth of the warps, whose places are `place_in_row`.
Sums of warps are added up in pairs, those of neighbours last, and so are then the sums of the parts: 0 to 2, 1 to 3,
these to each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.triton.dependent_launch import overlaps
from dist_infer.kernels.triton.float_pairs import widened

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def row_scale(values, eps, HIDDEN: tl.constexpr):
    """1 / sqrt(mean of squares + eps), rounded correctly, of a float32 tile that is zero beyond HIDDEN."""
    return scale_of_squares(tl.sum(values * values, 0), eps, HIDDEN)


@triton.jit
def scale_of_squares(squares, eps, HIDDEN: tl.constexpr):
    """row_scale, where the sum of squares is known."""
    return tl.div_rn(1.0, tl.sqrt_rn(squares / HIDDEN + eps))


@triton.jit
def row_scale_in_half(values, eps, HIDDEN: tl.constexpr, NUM_WARPS: tl.constexpr, VECTOR: tl.constexpr):
    """`row_scale` to the byte, of a tile that half of NUM_WARPS hold in vectors of VECTOR elements.

    A thread has the values of two, n and n + 16 NUM_WARPS, and the first addition over warps is that of these two.
    """
    if _INTERPRETED or NUM_WARPS == 1:
        total = tl.sum(values * values, 0)
    else:
        VECTORS: tl.constexpr = values.shape[0] // (32 * NUM_WARPS * VECTOR)  # of a thread of NUM_WARPS
        squares = tl.reshape(values * values, (VECTORS, 2, NUM_WARPS // 2, 32, VECTOR))
        threads = tl.reshape(tl.permute(squares, (1, 2, 3, 0, 4)), (2, NUM_WARPS // 2, 32, VECTORS * VECTOR))
        total = tl.sum(tl.sum(tl.sum(tl.sum(threads, 3), 2), 0), 0)
    return scale_of_squares(total, eps, HIDDEN)


@triton.jit
def place_in_row(place, part, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """Where a place of a part of a tile lies in the tile; CHUNK places are a warp's, which lie together."""
    if PARTS > 1:
        place = place // CHUNK * (CHUNK * PARTS) + part * CHUNK + place % CHUNK
    return place


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    normed,
    total,
    x_stride,
    residual_stride,
    eps,
    HIDDEN: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < HIDDEN
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gains = widened(tl.load(weight + columns, mask=inside, other=0))
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0)
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=inside, other=0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + row * HIDDEN + columns, values, mask=inside)
    values = widened(values)
    result = values * row_scale(values, eps, HIDDEN) * gains
    tl.store(normed + row * HIDDEN + columns, result.to(normed.dtype.element_ty), mask=inside)


def tile_of(hidden: int) -> tuple[int, int]:
    """Columns of the tile that holds a row, and warps that share it: up to sixteen values a thread."""
    tile = triton.next_power_of_2(hidden)
    return tile, min(16, max(1, tile // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.rms_norm.rms_norm`."""
    num_tokens, hidden = x.shape
    normed = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    x, residual = aligned_rows(x), None if residual is None else aligned_rows(residual)
    if num_tokens == 0:
        return normed, total
    tile, num_warps = tile_of(hidden)
    overlap = overlaps(x)
    _rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        normed,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        HIDDEN=hidden,
        TILE=tile,
        OVERLAP=overlap,
        num_warps=num_warps,
        launch_pdl=overlap,
    )
    return normed, total


def aligned_rows(x: Tensor) -> Tensor:
    """`x`, or a copy where its rows lie such that the compiler would choose narrower loads than for other rows."""
    in_line = x.stride(0) == x.shape[1] or (x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0)
    if x.stride(1) == 1 and in_line and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
