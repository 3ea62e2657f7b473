"""Products with packed MXFP8 and NVFP4 weights in Triton; the contract stands in kernels/scaled_linear.py.

Few tokens: the time is that of reading the weight, if nothing stands in the way. So a warp reads tiles of 16 rows into
registers as they lie, dequantises them there and multiplies by m16n8k16, without shared memory and without waiting for
other warps; these take other rows and, `shares` of them, other tiles of the same rows. Inputs come from the cache. With
more than one eight of tokens they are what takes long: packed_blocks.py is for those, packed_many.py serves prompts.
"""
# ruff: noqa: RUF005 (Triton knows no unpacking in tuples)
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment, var-annotated"

from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.carriers import Fp8Tensor, QuantizedTensor
from dist_infer.kernels.packed_weight import ROWS, PackedWeight
from dist_infer.kernels.triton.dependent_launch import may_read_early, overlapping
from dist_infer.kernels.triton.packed_blocks import multiply_some
from dist_infer.kernels.triton.packed_many import multiply_many
from dist_infer.kernels.triton.packed_sums import add_splits_into
from dist_infer.kernels.triton.packed_tiles import add_tile, load_tile, side_by_side, within

MAX_FEW, MAX_SOME = 8, 64  # tokens, of the kernels for so many
_UNIT = tl.constexpr(2.0**9)  # an NVFP4 sum by what the kernel adds up (weight_tiles.py)
# Measured on an H200: warps that share a weight, at least, and those of a program
_WARPS_ON_DEVICE = MappingProxyType({"nvfp4": 2112, "mxfp8": 4224})
_NUM_WARPS = 4
_MIN_TILES = 4  # that are worth a warp


@triton.jit(do_not_specialize=["is_early"])
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
    tiles_per_split,
    is_early,
    IS_SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    STACKED: tl.constexpr,
    SHARES: tl.constexpr,
    EIGHTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """GROUPS times STACKED groups of 16 outputs; with several splits of K the float32 part, for `add_splits`.

    A warp has STACKED groups, whose tiles SHARES warps share. x as int32: pairs of inputs. There are `num_tiles`
    across, of which a split has `tiles_per_split`.
    """
    THREADS: tl.constexpr = GROUPS * SHARES * 32
    COLUMNS: tl.constexpr = 128 if FORMAT == "nvfp4" else 64
    WORDS: tl.constexpr = 256
    SCALE_WORDS: tl.constexpr = 32 if FORMAT == "nvfp4" else 8
    thread = tl.arange(0, THREADS)
    g, c = thread % 32 // 4, thread % 4
    vector = tl.arange(0, 4)
    split = tl.program_id(2)
    share = (tiles_per_split + SHARES - 1) // SHARES
    first = split * tiles_per_split + thread // (32 * GROUPS) * share
    end = tl.minimum(split * tiles_per_split + tiles_per_split, num_tiles)
    num_own = tl.minimum(share, end - first)
    first = tl.minimum(first, num_tiles)
    is_own = num_own[:, None] if FORMAT == "nvfp4" else num_own
    data_at = ()
    scales_at = ()
    for idx in tl.static_range(STACKED):
        group = tl.program_id(0) * (GROUPS * STACKED) + thread // 32 % GROUPS * STACKED + idx
        at_tile = tl.minimum(group, num_groups - 1).to(tl.int64) * num_tiles + first
        data_at = data_at + (data + at_tile[:, None] * WORDS + thread[:, None] % 32 * 4 + vector[None, :],)
        if FORMAT == "nvfp4":
            own_scales = scales + at_tile[:, None] * SCALE_WORDS + g[:, None] * 4 + vector[None, :]
        else:
            own_scales = scales + at_tile * SCALE_WORDS + g
        scales_at = scales_at + (own_scales,)
    token = tl.program_id(1) * (8 * EIGHTS) + g
    is_token = ()
    for eight in tl.static_range(EIGHTS):
        is_token = is_token + ((token + 8 * eight < num_tokens)[:, None],)
    x_at = x + (token * x_stride + first * (COLUMNS // 2))[:, None] + c[:, None] * 4 + vector[None, :]
    selector = tl.where(c // 2 == 0, 0x6420, 0x7531)
    zero = tl.zeros((THREADS,), tl.float32)
    sums = ()
    for _ in tl.static_range(STACKED * EIGHTS):
        sums = sums + ((zero, zero, zero, zero),)
    if OVERLAP:  # noqa: SIM102 (the one is known to the compiler, the other isn't)
        if is_early == 0:
            gdc_wait()
    even = load_tile(data_at, scales_at, 0, is_own > 0, STACKED, WORDS, SCALE_WORDS)
    odd = load_tile(data_at, scales_at, 1, is_own > 1, STACKED, WORDS, SCALE_WORDS)
    if OVERLAP:
        gdc_wait()
    for tile in range(0, share, 2):
        has = within(is_token, (num_own > tile)[:, None], EIGHTS)
        sums = add_tile(even, x_at, x_stride, tile, has, selector, sums, FORMAT, COLUMNS, STACKED, EIGHTS, THREADS)
        even = load_tile(data_at, scales_at, tile + 2, is_own > tile + 2, STACKED, WORDS, SCALE_WORDS)
        has = within(is_token, (num_own > tile + 1)[:, None], EIGHTS)
        sums = add_tile(odd, x_at, x_stride, tile + 1, has, selector, sums, FORMAT, COLUMNS, STACKED, EIGHTS, THREADS)
        odd = load_tile(data_at, scales_at, tile + 3, is_own > tile + 3, STACKED, WORDS, SCALE_WORDS)
    if OVERLAP:
        gdc_launch_dependents()
    NUM_SUMS: tl.constexpr = STACKED * EIGHTS * 4  # of a thread
    total = tl.sum(tl.reshape(side_by_side(sums, STACKED * EIGHTS), (SHARES, GROUPS * 32, NUM_SUMS)), 0)
    if FORMAT == "nvfp4":
        total *= _UNIT
    lane, idx = tl.arange(0, GROUPS * 32)[:, None], tl.arange(0, NUM_SUMS)[None, :]
    stacked, eight, place = idx // (4 * EIGHTS), idx // 4 % EIGHTS, idx % 4
    output = (tl.program_id(0) * (GROUPS * STACKED) + lane // 32 * STACKED + stacked) * 16
    output += lane % 32 // 4 + place // 2 * 8
    column = tl.program_id(1) * (8 * EIGHTS) + 8 * eight + lane % 4 * 2 + place % 2
    at = column.to(tl.int64) * num_outputs + output
    inside = (column < num_tokens) & (output < num_outputs)
    if IS_SPLIT:
        tl.store(out + split.to(tl.int64) * num_tokens * num_outputs + at, total, mask=inside)
    else:
        if global_scale is not None:
            total = tl.div_rn(total, tl.load(global_scale))
        if bias is not None:
            total += tl.load(bias + output, mask=output < num_outputs, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """How `multiply_packed` shares a product out: its constants of these names, and splits of K over programs."""

    groups: int
    stacked: int
    shares: int
    num_splits: int


def plan_packed(weight: PackedWeight) -> PackedPlan:
    """A function of the weight alone: a token's sums are added up so in any company of up to `MAX_FEW`."""
    quant_format = "nvfp4" if weight.is_nvfp4 else "mxfp8"
    num_groups = triton.cdiv(weight.shape[0], ROWS)
    wanted = triton.next_power_of_2(triton.cdiv(_WARPS_ON_DEVICE[quant_format], num_groups))
    shares = max(1, min(8, wanted, triton.next_power_of_2(weight.tiles_across // _MIN_TILES)))
    return PackedPlan(groups=max(1, _NUM_WARPS // shares), stacked=1, shares=shares, num_splits=1)


def eights_of(num_tokens: int) -> int:
    """Eights of tokens that a program takes: a power of two."""
    eights: int = triton.next_power_of_2(triton.cdiv(num_tokens, 8))
    return eights


def packed_linear(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PackedWeight, bias: Tensor | None, out_dtype: torch.dtype
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
        multiply_few(x, weight, bias, out, plan_packed(weight))
    return out


def multiply_few(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, plan: PackedPlan) -> None:
    """The product of a few tokens; x in rows on 16 bytes, as wide as the tiles."""
    (num_tokens, num_outputs), tiles = out.shape, weight.tiles_across
    tiles_per_split = triton.cdiv(tiles, plan.num_splits)
    num_splits = triton.cdiv(tiles, tiles_per_split)
    parts = out if num_splits == 1 else torch.empty(num_splits, num_tokens, num_outputs, device=x.device)
    eights = eights_of(num_tokens)
    num_groups = triton.cdiv(num_outputs, ROWS)
    multiply_packed[(triton.cdiv(num_groups, plan.groups * plan.stacked), 1, num_splits)](
        x.view(torch.int32),
        weight.data,
        weight.scales,
        weight.global_scale,
        bias,
        parts,
        num_tokens,
        num_outputs,
        x.stride(0) // 2,
        num_groups,
        tiles,
        tiles_per_split,
        int(may_read_early(x)),
        IS_SPLIT=num_splits > 1,
        FORMAT="nvfp4" if weight.is_nvfp4 else "mxfp8",
        GROUPS=plan.groups,
        STACKED=plan.stacked,
        SHARES=plan.shares,
        EIGHTS=eights,
        num_warps=plan.groups * plan.shares,
        **overlapping(x),
    )
    if num_splits > 1:
        add_splits_into(parts, weight.global_scale, bias, out)
