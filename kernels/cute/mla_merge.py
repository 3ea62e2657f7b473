"""The parts of a sequence that several CTAs worked on become one, in the launch that made them (see mla_parts)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dist_infer.kernels.cute.mla_clerk import CONSUMERS, DUTY_BARRIER
from dist_infer.kernels.cute.mla_parts import ROWS_OF_FRAGMENT, UNIT, UNITS_OF_ROW, clear, collect, in_fragments
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, normalise
from dist_infer.kernels.cute.mla_tiles import Task

NUM_WARPS = CONSUMERS // 32
_UNITS_AT_ONCE = 2  # of a CTA
SCRATCH = _UNITS_AT_ONCE * (UNIT + 2 * ROWS_OF_FRAGMENT) * NUM_WARPS  # floats
_MERGE_BARRIER = 3


@cute.jit
def merge_parts(adjacent: cutlass.Constexpr, task: Task, duty: cute.Tensor, scratch: cute.Tensor) -> None:
    """What the consumers merge, when their own tiles are done. For `adjacent` see mla_parts."""
    cute.arch.barrier(barrier_id=DUTY_BARRIER, number_of_threads=CONSUMERS + 32)
    for kind in cutlass.range(2, unroll=1):
        seq, worker, count, shares, share, last = (cute.arch.make_warp_uniform(duty[kind, idx]) for idx in range(6))
        while share <= last:
            if cute.arch.make_warp_uniform(duty[kind, 6 + share // 32]) >> share % 32 & 1 > 0:
                _merge_share(adjacent, task, scratch, seq, worker, count, share, shares)
            share += 1


@cute.jit
def _merge_share(
    adjacent: cutlass.Constexpr,
    task: Task,
    scratch: cute.Tensor,
    seq: Int32,
    worker: Int32,
    count: Int32,
    share: Int32,
    shares: Int32,
) -> None:
    """Units share + i * shares of a sequence; of few parts each warp takes units of its own."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32 - 4)
    units = Int32(task.part_lse.shape[1])
    if cutlass.const_expr(not in_fragments(task)):
        units = cutlass.min(units, task.rows * UNITS_OF_ROW - task.row_tile * units)
    unit, stride = share + shares * warp, shares * NUM_WARPS
    if count <= 2:
        while unit < units:
            _merge_by_warp(adjacent, 8, 2, task, seq, worker, count, unit, stride, units)
            unit += 8 * stride
    elif count <= 4:
        while unit < units:
            _merge_by_warp(adjacent, 4, 4, task, seq, worker, count, unit, stride, units)
            unit += 4 * stride
    elif count <= 8:
        while unit < units:
            _merge_by_warp(adjacent, 2, 8, task, seq, worker, count, unit, stride, units)
            unit += 2 * stride
    elif count <= 16 or stride <= units:
        while unit < units:
            _merge_by_warp(adjacent, 1, 16, task, seq, worker, count, unit, stride, units)
            unit += stride
    elif count <= 8 * NUM_WARPS:
        unit = share
        while unit < units:
            _merge_by_cta(adjacent, 2, 8, task, scratch, seq, worker, count, unit, shares, units, warp)
            unit += 2 * shares
    else:
        unit = share
        while unit < units:
            _merge_by_cta(adjacent, 1, 16, task, scratch, seq, worker, count, unit, shares, units, warp)
            unit += shares


@cute.jit
def _merge_by_warp(
    adjacent: cutlass.Constexpr,
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    task: Task,
    seq: Int32,
    worker: Int32,
    count: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
) -> None:
    """Units unit + i * stride, of so many parts at once."""
    inverse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    merged = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    sums, totals, largest = _sum_parts(
        num_units, num_parts, task, worker, Int32(0), Int32(1), count, unit, stride, units
    )
    for i in cutlass.range_constexpr(num_units):
        if unit + i * stride < units:
            for idx in cutlass.range_constexpr(2):
                inverse[idx], merged[idx] = normalise(totals[idx, i], finite(largest[idx, i]))
            for idx in cutlass.range_constexpr(4):
                values[idx] = sums[idx, i] * inverse[idx % 2]
            _write(adjacent, task, seq, unit + i * stride, values, merged)


@cute.jit
def _merge_by_cta(
    adjacent: cutlass.Constexpr,
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    task: Task,
    scratch: cute.Tensor,
    seq: Int32,
    worker: Int32,
    count: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
    warp: Int32,
) -> None:
    """The warps share the parts, so many at once; then a warp has a unit."""
    lane = cute.arch.lane_idx()
    sums = cute.make_tensor(scratch.iterator, cute.make_layout((4, 32, num_units, NUM_WARPS)))
    stats = cute.make_tensor(
        scratch.iterator + _UNITS_AT_ONCE * UNIT * NUM_WARPS,
        cute.make_layout((2, 2, ROWS_OF_FRAGMENT // 2, num_units, NUM_WARPS)),
    )
    sofar, totals, largest = _sum_parts(
        num_units, num_parts, task, worker, warp, Int32(NUM_WARPS), count, unit, stride, units
    )
    for i in cutlass.range_constexpr(num_units):
        sums[None, lane, i, warp].store(sofar[None, i].load())
        if lane < ROWS_OF_FRAGMENT // 2:
            stats[0, None, lane, i, warp].store(largest[None, i].load())
            stats[1, None, lane, i, warp].store(totals[None, i].load())
    cute.arch.barrier(barrier_id=_MERGE_BARRIER, number_of_threads=CONSUMERS)
    if warp < num_units and unit + warp * stride < units:
        values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
        merged = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        values.fill(0.0)
        for row in cutlass.range_constexpr(2):
            both = Float32(NOTHING)
            for other in cutlass.range_constexpr(NUM_WARPS):
                both = cute.arch.fmax(both, stats[0, row, lane % 4, warp, other])
            total = Float32(0.0)
            for other in cutlass.range_constexpr(NUM_WARPS):
                weight = exp2(stats[0, row, lane % 4, warp, other] - finite(both))
                total += stats[1, row, lane % 4, warp, other] * weight
                for h in cutlass.range_constexpr(2):
                    values[row + 2 * h] += sums[row + 2 * h, lane, warp, other] * weight
            inverse, merged[row] = normalise(total, finite(both))
            for h in cutlass.range_constexpr(2):
                values[row + 2 * h] = values[row + 2 * h] * inverse
        _write(adjacent, task, seq, unit + warp * stride, values, merged)
    cute.arch.barrier(barrier_id=_MERGE_BARRIER, number_of_threads=CONSUMERS)


@cute.jit
def _sum_parts(
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    task: Task,
    worker: Int32,
    part: Int32,
    step: Int32,
    count: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
):
    """(values [4, unit], totals [2, unit], maxima [2, unit]) of parts part + p * step, which are EMPTY then."""
    words = cute.make_rmem_tensor(cute.make_layout((6, num_parts, num_units)), Int32)
    sofar = cute.make_rmem_tensor(cute.make_layout((4, num_units)), Float32)
    totals = cute.make_rmem_tensor(cute.make_layout((2, num_units)), Float32)
    largest = cute.make_rmem_tensor(cute.make_layout((2, num_units)), Float32)
    sofar.fill(0.0)
    totals.fill(0.0)
    largest.fill(NOTHING)
    while part < count:
        collect(num_units, num_parts, words, task, worker, part, step, count, unit, stride, units)
        for i in cutlass.range_constexpr(num_units):
            values, more, references = _sum_up(num_parts, words, i)
            for row in cutlass.range_constexpr(2):
                reference = references[row]
                if more[row] == 0.0:
                    reference = Float32(NOTHING)
                both = cute.arch.fmax(largest[row, i], reference)
                old, new = exp2(largest[row, i] - finite(both)), exp2(reference - finite(both))
                for h in cutlass.range_constexpr(2):
                    idx = cutlass.const_expr(row + 2 * h)
                    sofar[idx, i] = sofar[idx, i] * old + values[idx] * new
                totals[row, i] = totals[row, i] * old + more[row] * new
                largest[row, i] = both
        clear(num_units, num_parts, task, worker, part, step, count, unit, stride, units)
        part += num_parts * step
    return sofar, totals, largest


@cute.jit
def _sum_up(num_parts: cutlass.Constexpr, words: cute.Tensor, i: cutlass.Constexpr):
    """(values [4], totals [2], references [2]) of a unit's parts; value idx is of row idx % 2."""
    values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    totals = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    references = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    values.fill(0.0)
    totals.fill(0.0)
    for row in cutlass.range_constexpr(2):
        largest = Float32(NOTHING)
        for p in cutlass.range_constexpr(num_parts):
            largest = cute.arch.fmax(largest, words[4 + row, p, i].bitcast(Float32))
        references[row] = finite(largest)
        for p in cutlass.range_constexpr(num_parts):
            weight = exp2(words[4 + row, p, i].bitcast(Float32) - references[row])
            totals[row] += weight
            for h in cutlass.range_constexpr(2):
                values[row + 2 * h] += weight * words[row + 2 * h, p, i].bitcast(Float32)
    return values, totals, references


@cute.jit
def _write(
    adjacent: cutlass.Constexpr, task: Task, seq: Int32, unit: Int32, values: cute.Tensor, merged: cute.Tensor
) -> None:
    """A unit of the call's output, and the logarithms once for each row."""
    lane = cute.arch.lane_idx()
    rows = cutlass.const_expr(task.part_lse.shape[1] // UNITS_OF_ROW)
    first_row = task.row_tile * rows
    if cutlass.const_expr(in_fragments(task)):
        group = unit % (rows // ROWS_OF_FRAGMENT)
        dim = unit // (rows // ROWS_OF_FRAGMENT) * (UNIT // ROWS_OF_FRAGMENT)
        two = cute.make_rmem_tensor(cute.make_layout(2), task.out.element_type)
        for idx in cutlass.range_constexpr(2):
            row = first_row + group * ROWS_OF_FRAGMENT + lane % 4 * 2 + idx
            if row < task.rows:
                to = task.out[seq * task.rows + row, None]
                for h in cutlass.range_constexpr(2):
                    two[h] = values[idx + 2 * h].to(task.out.element_type)
                if cutlass.const_expr(adjacent):
                    cute.local_tile(to, (2,), (dim // 2 + lane // 4,)).store(two.load())
                else:
                    for h in cutlass.range_constexpr(2):
                        to[dim + lane // 4 + 8 * h] = two[h]
                if dim + lane // 4 == 0:
                    task.lse[seq * task.rows + row] = merged[idx]
    else:
        rounded = cute.make_rmem_tensor(cute.make_layout(4), task.out.element_type)
        for idx in cutlass.range_constexpr(4):
            rounded[idx] = values[idx].to(task.out.element_type)
        row = seq * task.rows + first_row + unit // UNITS_OF_ROW
        quad = unit % UNITS_OF_ROW * (UNIT // 4) + lane
        cute.local_tile(task.out[row, None], (4,), (quad,)).store(rounded.load())
        if quad == 0:
            task.lse[row] = merged[0]
