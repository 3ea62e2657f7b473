"""The choice of a token among the likeliest in Triton; the contract stands in kernels/sample_filtered.py.

16-bit logits have 65,536 values, so a row is filtered by its histogram: equal logits have equal weights, and no row is
sorted. Bins are numbered from the largest value down. One launch finds the largest logits, one counts those within
reach of them and adds up weights, one program a row finds where the columns that are in end (a value, and the last
column of those that equal it), two launches draw one of them. That they end beyond the reach is rare: then the program
counts the other columns itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.reference.sample_filtered import sample_filtered as reference_sample_filtered
from dist_infer.kernels.triton.sample import sample_above

_BINS = tl.constexpr(65536)
_UNIT = tl.constexpr(2.0**45)
_NO_LIMIT = tl.constexpr(2**63 - 1)
_REACH = tl.constexpr(8.0)  # a column at its end has the weight e^-8
_COUNT_BLOCK = 1024
_COUNT_PROGRAMS = 1056
_TILE = 4096
_OPTIONS = ["temperature", "top_k", "top_p", "min_p"]  # lie anywhere in a step's inputs


@triton.jit
def _bin(values):
    """The bin of 16-bit logits: 0 for the largest value there is; NaN as -inf, -0 as 0."""
    values = tl.where(values == values, values.to(tl.float32), float("-inf")).to(values.dtype)
    values = tl.where(values == 0, tl.zeros_like(values), values)
    bits = values.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(bits < 0, bits + 65536, 32767 - bits)


@triton.jit
def _value(bins, DTYPE: tl.constexpr):
    """The value of a bin in float64."""
    bits = tl.where(bins > 32767, bins - 65536, 32767 - bins).to(tl.int16)
    return bits.to(DTYPE, bitcast=True).to(tl.float64)


@triton.jit
def _options(temperature, top_k, top_p, min_p, row, num_columns):
    """(whether the row is filtered at all, temperature, how many are in at most, top_p, min_p)."""
    heat, count = tl.load(temperature + row), tl.load(top_k + row)
    share, floor = tl.load(top_p + row), tl.load(min_p + row)
    count = tl.where((count > 0) & (count < num_columns), count, num_columns)
    is_filtered = (heat != 0) & ((count < num_columns) | (share < 1) | (floor > 0))
    return is_filtered, heat, count, share, floor


@triton.jit
def _units(bins, first, heat, DTYPE: tl.constexpr):
    """(weights, the same as multiples of 2^-45) of the values of some bins, next to the largest value."""
    value = _value(bins, DTYPE)
    weight = tl.exp(tl.where(value == first, 0.0, (value - first) / heat))
    return weight, tl.floor(weight * _UNIT + 0.5).to(tl.int64)


@triton.jit
def _within_reach(bins, first_bin, heat, DTYPE: tl.constexpr):
    """Whether the values of some bins are counted at once: true from the largest down to some value."""
    value, first = _value(bins, DTYPE).to(tl.float32), _value(first_bin, DTYPE).to(tl.float32)
    return (bins == first_bin) | (first - value < heat.to(tl.float32) * _REACH)


@triton.jit
def _block_of_bins(logits, row, start, num_columns, row_stride, BLOCK: tl.constexpr):
    """(bins of a block of columns, which of them there are)."""
    column = start + tl.arange(0, BLOCK)
    inside = column < num_columns
    return _bin(tl.load(logits + row * row_stride + column, mask=inside, other=0)), inside


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def _find_first(logits, temperature, top_k, top_p, min_p, sums, num_columns, part_len, row_stride, BLOCK: tl.constexpr):
    """The bin of each row's largest logit, as 65536 less it, so that it grows from zero."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_filtered, _, _, _, _ = _options(temperature, top_k, top_p, min_p, row, num_columns)
    if is_filtered:
        first_bin = tl.full([], _BINS, tl.int32)
        for start in range(part * part_len, tl.minimum((part + 1) * part_len, num_columns), BLOCK):
            bins, inside = _block_of_bins(logits, row, start, num_columns, row_stride, BLOCK)
            first_bin = tl.minimum(first_bin, tl.min(tl.where(inside, bins, _BINS), 0))
        tl.atomic_max(sums + 2 * row, (65536 - first_bin).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def _count(
    logits, temperature, top_k, top_p, min_p, counts, sums, num_columns, part_len, row_stride, BLOCK: tl.constexpr
):
    """Counts of the bins within reach; the sum of all units of a row that only top-p and min-p limit."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_filtered, heat, count, share, floor = _options(temperature, top_k, top_p, min_p, row, num_columns)
    if is_filtered:
        DTYPE: tl.constexpr = logits.dtype.element_ty
        first_bin = (65536 - tl.load(sums + 2 * row)).to(tl.int32)
        first = _value(first_bin, DTYPE)
        total = tl.zeros([], tl.int64)
        for start in range(part * part_len, tl.minimum((part + 1) * part_len, num_columns), BLOCK):
            bins, inside = _block_of_bins(logits, row, start, num_columns, row_stride, BLOCK)
            is_near = inside & _within_reach(bins, first_bin, heat, DTYPE)
            tl.atomic_add(counts + row * _BINS + bins, 1, mask=is_near, sem="relaxed")
            if (share < 1) & (count == num_columns):
                weight, units = _units(bins, first, heat, DTYPE)
                total += tl.sum(tl.where(inside & (weight >= floor), units, 0), 0)
        if (share < 1) & (count == num_columns):
            tl.atomic_add(sums + 2 * row + 1, total, sem="relaxed")


@triton.jit
def _count_the_others(logits, counts, row, first_bin, heat, num_columns, row_stride, BLOCK: tl.constexpr):
    for start in range(0, num_columns, BLOCK):
        bins, inside = _block_of_bins(logits, row, start, num_columns, row_stride, BLOCK)
        is_far = inside & (_within_reach(bins, first_bin, heat, logits.dtype.element_ty) == 0)
        tl.atomic_add(counts + bins, 1, mask=is_far, sem="relaxed")
    tl.debug_barrier()


@triton.jit
def _candidates(held, bins, last_bin, last_count, weight, floor):
    """How many of the columns in some bins min-p and top-k leave."""
    return tl.where(weight >= floor, tl.where(bins < last_bin, held, tl.where(bins == last_bin, last_count, 0)), 0)


@triton.jit(do_not_specialize_on_alignment=_OPTIONS)
def _find_cuts(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    counts,
    sums,
    cut_values,
    last_ties,
    num_columns,
    row_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    is_filtered, heat, count, share, floor = _options(temperature, top_k, top_p, min_p, row, num_columns)
    if not is_filtered:
        tl.store(cut_values + row, tl.full([], float("-inf"), tl.float64))
        tl.store(last_ties + row, num_columns)
    else:
        DTYPE: tl.constexpr = logits.dtype.element_ty
        counts += row * _BINS
        lane = tl.arange(0, TILE)
        first_bin = (65536 - tl.load(sums + 2 * row)).to(tl.int32)
        first = _value(first_bin, DTYPE)
        first_tile = first_bin // TILE * TILE
        has_all = False

        # The bin that holds number `count`, and how many of it are in.
        start, num_before = first_tile, 0
        last_bin, last_count = 65536, 0
        while (last_bin == 65536) & (count < num_columns):
            if start == _BINS:
                _count_the_others(logits, counts, row, first_bin, heat, num_columns, row_stride, TILE)
                has_all = True
                start, num_before = first_tile, 0
            held = tl.load(counts + start + lane, cache_modifier=".cg")
            ends = num_before + tl.cumsum(held, 0)
            place = tl.min(tl.where(ends >= count, lane, _BINS), 0)
            if place < TILE:
                last_bin = start + place
                last_count = (count - tl.max(tl.where(lane == place, ends - held, 0), 0)).to(tl.int32)
            num_before += tl.sum(held, 0)
            start += TILE

        # The weights of what min-p and top-k leave; those of 0 units change nothing.
        limit = tl.full([], _NO_LIMIT, tl.int64)
        if share < 1:
            total = tl.load(sums + 2 * row + 1)
            start = first_tile
            while (start <= last_bin) & (count < num_columns):
                bins = start + lane
                held = tl.load(counts + bins, cache_modifier=".cg")
                if tl.max(held, 0) > 0:
                    weight, units = _units(bins, first, heat, DTYPE)
                    left = _candidates(held, bins, last_bin, last_count, weight, floor)
                    total += tl.sum(left * units, 0)
                start += TILE
            limit = tl.ceil(share * total.to(tl.float64)).to(tl.int64)

        # The first bin of which not all are in. What is out of reach has a weight below e^-8.
        start, mass = first_tile, tl.zeros([], tl.int64)
        cut_bin, num_in, last_held = 65536, 0, first_bin
        is_all_in = False
        while (cut_bin == 65536) & (start < _BINS):
            bins = start + lane
            held = tl.load(counts + bins, cache_modifier=".cg")
            if tl.max(held, 0) > 0:
                last_held = tl.max(tl.where(held > 0, bins, 0), 0)
                weight, units = _units(bins, first, heat, DTYPE)
                left = _candidates(held, bins, last_bin, last_count, weight, floor)
                masses = left * units
                before = mass + tl.cumsum(masses, 0) - masses
                is_cut = (held > 0) & ((left < held) | (before + (left - 1) * units >= limit))
                place = tl.min(tl.where(is_cut, lane, _BINS), 0)
                if place < TILE:
                    cut_bin = start + place
                    at = lane == place
                    room = limit - tl.max(tl.where(at, before, 0), 0)
                    unit = tl.max(tl.where(at, units, 0), 0)
                    num_in = tl.max(tl.where(at, left, 0), 0)
                    if room <= 0:
                        num_in = 0
                    elif unit > 0:
                        num_in = tl.minimum(num_in, (room - 1) // unit + 1).to(tl.int32)
                    if cut_bin == first_bin:
                        num_in = tl.maximum(num_in, 1)
                mass += tl.sum(masses, 0)
            start += TILE
            if (cut_bin == 65536) & (start == _BINS):
                is_all_in = True
                if floor > 0.001:
                    cut_bin = last_held
                elif not has_all:
                    _count_the_others(logits, counts, row, first_bin, heat, num_columns, row_stride, TILE)
                    has_all = True
                    is_all_in = False
                    start, mass = first_tile, tl.zeros([], tl.int64)
        tl.store(cut_values + row, tl.where(cut_bin == 65536, float("-inf"), _value(cut_bin, DTYPE)))

        # The column of number `num_in` among those of the last bin.
        last_tie, num_seen, start = -1, 0, 0
        if is_all_in:
            last_tie, num_in = num_columns, 0
        while (num_seen < num_in) & (start < num_columns):
            bins, inside = _block_of_bins(logits, row, start, num_columns, row_stride, TILE)
            is_tie = ((bins == cut_bin) & inside).to(tl.int32)
            seen = num_seen + tl.cumsum(is_tie, 0)
            place = tl.min(tl.where((seen == num_in) & (is_tie > 0), lane, _BINS), 0)
            if place < TILE:
                last_tie = start + place
            num_seen += tl.sum(is_tie, 0)
            start += TILE
        tl.store(last_ties + row, last_tie)


def sample_filtered(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """See `dist_infer.kernels.sample_filtered.sample_filtered`; logits of more bits go through plain torch."""
    if logits.dtype.itemsize != 2:
        return reference_sample_filtered(logits, temperature, top_k, top_p, min_p, keys)
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return keys.new_empty(0)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    options = tuple(option.contiguous() for option in (temperature, top_k, top_p, min_p))
    counts = torch.zeros((num_rows, _BINS.value), dtype=torch.int32, device=logits.device)
    sums = torch.zeros((num_rows, 2), dtype=torch.int64, device=logits.device)
    cut_values = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    last_ties = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    part_len = triton.cdiv(num_columns, max(1, _COUNT_PROGRAMS // num_rows) * _COUNT_BLOCK) * _COUNT_BLOCK
    grid = (num_rows, triton.cdiv(num_columns, part_len))
    places = (num_columns, part_len, logits.stride(0))
    _find_first[grid](logits, *options, sums, *places, BLOCK=_COUNT_BLOCK, num_warps=4)
    _count[grid](logits, *options, counts, sums, *places, BLOCK=_COUNT_BLOCK, num_warps=4, enable_fp_fusion=False)
    _find_cuts[(num_rows,)](
        logits,
        *options,
        counts,
        sums,
        cut_values,
        last_ties,
        num_columns,
        logits.stride(0),
        TILE=_TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _, chosen = sample_above(logits, 0, temperature, keys, cut_values, last_ties)
    return chosen
