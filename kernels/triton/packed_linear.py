"""Products with packed MXFP8 and NVFP4 weights in Triton; the contract stands in kernels/scaled_linear.py.

Few tokens: the time is that of reading the weight, if nothing stands in the way. So a warp reads tiles of 16 rows into
registers as they lie, dequantises them there and multiplies by m16n8k16, without shared memory and without waiting for
other warps: all there are run at once, and each has a tile on its way while others compute. Inputs come from the cache.
With more than one eight of tokens they are what takes long: packed_blocks.py is for those, packed_many.py serves
prompts.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.carriers import Fp8Tensor, QuantizedTensor
from dist_infer.kernels.packed_weight import ROWS, PackedWeight
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.triton.dependent_launch import overlapping
from dist_infer.kernels.triton.packed_blocks import multiply_some
from dist_infer.kernels.triton.packed_many import multiply_many
from dist_infer.kernels.triton.packed_tiles import add_tile

MAX_FEW, MAX_SOME = 8, 64  # tokens, of the kernels for so many
_UNIT = tl.constexpr(2.0**9)  # an NVFP4 sum by what the kernel adds up (weight_tiles.py)
_WARPS_ON_DEVICE = 4224  # that share a weight, at least: an H200 holds about as many
_NUM_WARPS = 4
_MIN_TILES = 4  # that are worth a warp


@triton.jit
def multiply_packed(
    x,
    data,
    scales,
    global_scale,
    bias,
    out,
    num_tokens,
    num_outputs,
    x_stride,
    num_groups,
    num_tiles,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """GROUPS groups of 16 outputs, whose tiles SHARES warps share. x as int32: pairs of inputs of up to 8 tokens."""
    THREADS: tl.constexpr = GROUPS * SHARES * 32
    COLUMNS: tl.constexpr = 128 if FORMAT == "nvfp4" else 64
    WORDS: tl.constexpr = 256
    SCALE_WORDS: tl.constexpr = 32 if FORMAT == "nvfp4" else 8
    thread = tl.arange(0, THREADS)
    g, c = thread % 32 // 4, thread % 4
    vector = tl.arange(0, 4)
    share = (num_tiles + SHARES - 1) // SHARES
    first = thread // (32 * GROUPS) * share
    num_own = tl.minimum(share, num_tiles - first)
    group = tl.program_id(0) * GROUPS + thread // 32 % GROUPS
    at_tile = tl.minimum(group, num_groups - 1).to(tl.int64) * num_tiles + tl.minimum(first, num_tiles)
    data_at = data + at_tile[:, None] * WORDS + thread[:, None] % 32 * 4 + vector[None, :]
    if FORMAT == "nvfp4":
        scales_at = scales + at_tile[:, None] * SCALE_WORDS + g[:, None] * 4 + vector[None, :]
        num_scaled = num_own[:, None]
    else:
        scales_at = scales + at_tile * SCALE_WORDS + g
        num_scaled = num_own
    x_at = x + (g * x_stride + first * (COLUMNS // 2))[:, None] + c[:, None] * 4 + vector[None, :]
    num_read = tl.where(g < num_tokens, num_own, 0)[:, None]
    selector = tl.where(c // 2 == 0, 0x6420, 0x7531)
    zero = tl.zeros((THREADS,), tl.float32)
    sums = (zero, zero, zero, zero)
    if OVERLAP:
        gdc_wait()
    for tile in range(share):
        upper = tl.load(data_at + tile * WORDS)
        lower = tl.load(data_at + tile * WORDS + WORDS // 2)
        # scales of zero where the tile is another warp's
        loaded = (upper, lower, tl.load(scales_at + tile * SCALE_WORDS, mask=tile < num_scaled, other=0))
        sums = add_tile(loaded, x_at + tile * (COLUMNS // 2), tile < num_read, selector, sums, FORMAT, COLUMNS, THREADS)
    if OVERLAP:
        gdc_launch_dependents()
    four_sums = tl.join(tl.join(sums[0], sums[2]), tl.join(sums[1], sums[3]))
    total = tl.sum(tl.reshape(four_sums, (SHARES, GROUPS * 32, 4)), 0)
    if FORMAT == "nvfp4":
        total *= _UNIT
    lane, idx = tl.arange(0, GROUPS * 32)[:, None], tl.arange(0, 4)[None, :]
    output = (tl.program_id(0) * GROUPS + lane // 32) * 16 + lane % 32 // 4 + idx // 2 * 8
    token = lane % 4 * 2 + idx % 2
    if global_scale is not None:
        total = tl.div_rn(total, tl.load(global_scale))
    if bias is not None:
        total += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * num_outputs + output
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(token < num_tokens) & (output < num_outputs))


def packed_linear(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `dist_infer.kernels.scaled_linear.scaled_linear`: MXFP8 and NVFP4 weights that were packed."""
    if isinstance(x, Fp8Tensor) or not isinstance(weight, PackedWeight):
        raise TypeError("packed_linear takes an x that isn't quantised, and a weight that pack_weight made")
    (num_outputs, width), num_tokens = weight.shape, x.shape[0]
    out = torch.empty(num_tokens, num_outputs, dtype=out_dtype, device=x.device)
    if num_tokens == 0 or num_outputs == 0:
        return out
    if num_tokens > MAX_SOME:
        multiply_many(x, weight, bias, out)
        return out
    missing = weight.tiles_across * weight.columns - width
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    elif x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if num_tokens > MAX_FEW:
        multiply_some(x, weight, bias, out)
    else:
        multiply_few(x, weight, bias, out, shares_of(weight))
    return out


def shares_of(weight: PackedWeight) -> int:
    """Warps that share a group's tiles, a power of two: of the weight alone, so that company changes no token."""
    wanted = triton.next_power_of_2(triton.cdiv(_WARPS_ON_DEVICE, triton.cdiv(weight.shape[0], ROWS)))
    worth = triton.next_power_of_2(max(1, weight.tiles_across // _MIN_TILES))
    return int(max(1, min(8, wanted, worth)))


def multiply_few(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, shares: int) -> None:
    """The product of up to `MAX_FEW` tokens; x in rows on 16 bytes, as wide as the tiles."""
    num_tokens, num_outputs = out.shape
    groups = max(1, _NUM_WARPS // shares)
    num_groups = triton.cdiv(num_outputs, ROWS)
    multiply_packed[(triton.cdiv(num_groups, groups),)](
        x.view(torch.int32),
        weight.data,
        weight.scales,
        weight.global_scale,
        bias,
        out,
        num_tokens,
        num_outputs,
        x.stride(0) // 2,
        num_groups,
        weight.tiles_across,
        FORMAT="nvfp4" if weight.is_nvfp4 else "mxfp8",
        GROUPS=groups,
        SHARES=shares,
        num_warps=groups * shares,
        **overlapping(x),
    )
