"""The parts of a sequence that several CTAs worked on become one, in the launch that made them.

All words of a part are EMPTY until it is written, values and logarithms alike. So whoever merges parts (see mla_clerk)
loads their words until none is EMPTY, which takes no fence and no flag, and leaves them EMPTY for the next launch. Each
word has one reader.

A part is made of units of 128 values, four a lane, and the logarithms of their rows. They are either a fourth of a row
each, or 16 dims of 8 rows as a warp has them in fragments of a transposed product: then a lane's four are of two rows
and of dims 8 apart.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dist_infer.kernels.cute.mla_clerk import CONSUMERS, DUTY_BARRIER, MAX_CTAS, NUM_STATES
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, normalise
from dist_infer.kernels.cute.mla_tiles import LATENT, Task, part_slot

EMPTY = -1  # as a float a NaN that arithmetic does not give
NUM_WARPS = CONSUMERS // 32
_UNIT = 128
_UNITS_OF_ROW = LATENT // _UNIT
_UNITS_AT_ONCE = 2  # of a CTA
_ROWS_OF_FRAGMENT = 8
SCRATCH = _UNITS_AT_ONCE * (_UNIT + 2 * _ROWS_OF_FRAGMENT) * NUM_WARPS  # floats
_MERGE_BARRIER = 3
_FETCH = f"""{{
    .reg .pred lacks;
    .reg .b32 a, b, c, d, s, t;
    mov.b32 a, {{$r0}};
    mov.b32 b, {{$r1}};
    mov.b32 c, {{$r2}};
    mov.b32 d, {{$r3}};
    mov.b32 s, {{$r4}};
    mov.b32 t, {{$r5}};
    setp.eq.s32 lacks, a, {EMPTY};
    setp.eq.or.s32 lacks, b, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, c, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, d, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, s, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, t, {EMPTY}, lacks;
    @lacks ld.relaxed.gpu.global.v4.b32 {{a, b, c, d}}, [{{$r6}}];
    @lacks ld.relaxed.gpu.global.v2.b32 {{s, t}}, [{{$r7}}];
    mov.b32 {{$w0}}, a;
    mov.b32 {{$w1}}, b;
    mov.b32 {{$w2}}, c;
    mov.b32 {{$w3}}, d;
    mov.b32 {{$w4}}, s;
    mov.b32 {{$w5}}, t;
}}"""
_CLEAR_FOUR = "st.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};"
_CLEAR_TWO = "st.global.v2.b32 [{$r0}], {{$r1}, {$r1}};"


def workspace_size(rows: int, num_ctas: int) -> int:
    """In 32-bit words, for parts of up to so many rows. The first NUM_STATES are 0 between launches, others EMPTY."""
    return NUM_STATES + 2 * num_ctas * rows * _UNITS_OF_ROW * (_UNIT + _ROWS_OF_FRAGMENT)


@cute.jit
def parts_in(workspace: Int64, rows: cutlass.Constexpr, in_fragments: cutlass.Constexpr, num_ctas: Int32):
    """(values [part, unit, 128], logarithms [part, unit, 8 or 2], states [state or given up, CTA]) at an address.

    Of a fourth of a row there are two equal ones.
    """
    units = cutlass.const_expr(rows * _UNITS_OF_ROW)
    scores = cutlass.const_expr(_ROWS_OF_FRAGMENT if in_fragments else 2)
    lse = workspace + 4 * NUM_STATES
    out = lse + num_ctas * (8 * units * scores)
    return (
        cute.make_tensor(
            cute.make_ptr(Float32, out, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((2 * num_ctas, units, _UNIT), stride=(units * _UNIT, _UNIT, 1)),
        ),
        cute.make_tensor(
            cute.make_ptr(Float32, lse, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((2 * num_ctas, units, scores), stride=(units * scores, scores, 1)),
        ),
        cute.make_tensor(
            cute.make_ptr(Int32, workspace, cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout((2, MAX_CTAS), stride=(MAX_CTAS, 1)),
        ),
    )


@cute.jit
def rows_of_part(task: Task, slot: Int32) -> cute.Tensor:
    """Its values [row, dim], where units are fourths of rows. Those of rows that the call has not stay as they are."""
    rows = cutlass.const_expr(task.part_out.shape[1] // _UNITS_OF_ROW)
    layout = cute.make_layout((rows, LATENT), stride=(LATENT, 1))
    return cute.make_tensor(task.part_out[slot, None, None].iterator, layout)


@cute.jit
def leave_score(task: Task, slot: Int32, row: Int32, score: Float32) -> None:
    """The logarithm of a row, where units are fourths of rows."""
    two = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    two.fill(score)
    for idx in cutlass.range_constexpr(_UNITS_OF_ROW):
        task.part_lse[slot, row * _UNITS_OF_ROW + idx, None].store(two.load())


@cute.jit
def merge_parts(task: Task, duty: cute.Tensor, scratch: cute.Tensor) -> None:
    """What the consumers merge, when their own tiles are done."""
    cute.arch.barrier(barrier_id=DUTY_BARRIER, number_of_threads=CONSUMERS + 32)
    for kind in cutlass.range(2, unroll=1):
        seq, worker, count, shares, share, last = (cute.arch.make_warp_uniform(duty[kind, idx]) for idx in range(6))
        while share <= last:
            if cute.arch.make_warp_uniform(duty[kind, 6 + share // 32]) >> share % 32 & 1 > 0:
                _merge_share(task, scratch, seq, worker, count, share, shares)
            share += 1


@cute.jit
def _merge_share(
    task: Task, scratch: cute.Tensor, seq: Int32, worker: Int32, count: Int32, share: Int32, shares: Int32
) -> None:
    """Units share + i * shares of a sequence; of few parts each warp takes units of its own."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32 - 4)
    units = Int32(task.part_lse.shape[1])
    if cutlass.const_expr(not _in_fragments(task)):
        units = cutlass.min(units, task.rows * _UNITS_OF_ROW - task.row_tile * units)
    unit, stride = share + shares * warp, shares * NUM_WARPS
    if count <= 2:
        while unit < units:
            _merge_by_warp(8, 2, task, seq, worker, count, unit, stride, units)
            unit += 8 * stride
    elif count <= 4:
        while unit < units:
            _merge_by_warp(4, 4, task, seq, worker, count, unit, stride, units)
            unit += 4 * stride
    elif count <= 16:
        while unit < units:
            _merge_by_warp(1, 16, task, seq, worker, count, unit, stride, units)
            unit += stride
    elif count <= 8 * NUM_WARPS:
        unit = share
        while unit < units:
            _merge_by_cta(2, 8, task, scratch, seq, worker, count, unit, shares, units, warp)
            unit += 2 * shares
    else:
        unit = share
        while unit < units:
            _merge_by_cta(1, 16, task, scratch, seq, worker, count, unit, shares, units, warp)
            unit += shares


@cute.jit
def _merge_by_warp(
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
    """Units unit + i * stride of at most so many parts."""
    words = cute.make_rmem_tensor(cute.make_layout((6, num_parts, num_units)), Int32)
    inverse = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    merged = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    _collect(num_units, num_parts, words, task, worker, Int32(0), Int32(1), count, unit, stride, units)
    for i in cutlass.range_constexpr(num_units):
        if unit + i * stride < units:
            values, totals, references = _sum_up(num_parts, words, i)
            for idx in cutlass.range_constexpr(2):
                inverse[idx], merged[idx] = normalise(totals[idx], references[idx])
            for idx in cutlass.range_constexpr(4):
                values[idx] = values[idx] * inverse[idx % 2]
            _write(task, seq, unit + i * stride, values, merged)
    _clear(num_units, num_parts, task, worker, Int32(0), Int32(1), count, unit, stride, units)


@cute.jit
def _merge_by_cta(
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
        scratch.iterator + _UNITS_AT_ONCE * _UNIT * NUM_WARPS,
        cute.make_layout((2, 2, _ROWS_OF_FRAGMENT // 2, num_units, NUM_WARPS)),
    )
    words = cute.make_rmem_tensor(cute.make_layout((6, num_parts, num_units)), Int32)
    sofar = cute.make_rmem_tensor(cute.make_layout((4, num_units)), Float32)
    totals = cute.make_rmem_tensor(cute.make_layout((2, num_units)), Float32)
    largest = cute.make_rmem_tensor(cute.make_layout((2, num_units)), Float32)
    sofar.fill(0.0)
    totals.fill(0.0)
    largest.fill(NOTHING)
    part = warp
    while part < count:
        _collect(num_units, num_parts, words, task, worker, part, Int32(NUM_WARPS), count, unit, stride, units)
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
        _clear(num_units, num_parts, task, worker, part, Int32(NUM_WARPS), count, unit, stride, units)
        part += num_parts * NUM_WARPS
    for i in cutlass.range_constexpr(num_units):
        sums[None, lane, i, warp].store(sofar[None, i].load())
        if lane < _ROWS_OF_FRAGMENT // 2:
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
        _write(task, seq, unit + warp * stride, values, merged)
    cute.arch.barrier(barrier_id=_MERGE_BARRIER, number_of_threads=CONSUMERS)


@cute.jit
def _collect(
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    words: cute.Tensor,
    task: Task,
    worker: Int32,
    part: Int32,
    step: Int32,
    count: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
) -> None:
    """Words [4 of values and 2 of logarithms, part, unit] of parts part + p * step, once they are written."""
    for i in cutlass.range_constexpr(num_units):
        for p in cutlass.range_constexpr(num_parts):
            fill, score = Int32(0), Float32(NOTHING).bitcast(Int32)
            if part + p * step < count and unit + i * stride < units:
                fill, score = Int32(EMPTY), Int32(EMPTY)
            for idx in cutlass.range_constexpr(6):
                words[idx, p, i] = fill if cutlass.const_expr(idx < 4) else score
    lacking = Int32(1)
    while lacking > 0:
        for i in cutlass.range_constexpr(num_units):
            for p in cutlass.range_constexpr(num_parts):
                values_at, scores_at = _places(task, worker, part + p * step, unit + i * stride)
                new = cute.arch.inline_ptx(
                    _FETCH,
                    write_only_types=[Int32] * 6,
                    read_only_args=[*(words[idx, p, i] for idx in range(6)), values_at, scores_at],
                )
                for idx in cutlass.range_constexpr(6):
                    words[idx, p, i] = new[idx]
        lacks = words[0, 0, 0] == EMPTY
        for i in cutlass.range_constexpr(num_units):
            for p in cutlass.range_constexpr(num_parts):
                for idx in cutlass.range_constexpr(6):
                    lacks = lacks or words[idx, p, i] == EMPTY
        lacking = Int32(0)
        if cute.arch.vote_any_sync(lacks):
            lacking = Int32(1)


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
def _write(task: Task, seq: Int32, unit: Int32, values: cute.Tensor, merged: cute.Tensor) -> None:
    """A unit of the call's output, and the logarithms once for each row."""
    lane = cute.arch.lane_idx()
    rows = cutlass.const_expr(task.part_lse.shape[1] // _UNITS_OF_ROW)
    first_row = task.row_tile * rows
    if cutlass.const_expr(_in_fragments(task)):
        group = unit % (rows // _ROWS_OF_FRAGMENT)
        dim = unit // (rows // _ROWS_OF_FRAGMENT) * (_UNIT // _ROWS_OF_FRAGMENT) + lane // 4
        for idx in cutlass.range_constexpr(2):
            row = first_row + group * _ROWS_OF_FRAGMENT + lane % 4 * 2 + idx
            if row < task.rows:
                for h in cutlass.range_constexpr(2):
                    task.out[seq * task.rows + row, dim + 8 * h] = values[idx + 2 * h].to(task.out.element_type)
                if dim == 0:
                    task.lse[seq * task.rows + row] = merged[idx]
    else:
        rounded = cute.make_rmem_tensor(cute.make_layout(4), task.out.element_type)
        for idx in cutlass.range_constexpr(4):
            rounded[idx] = values[idx].to(task.out.element_type)
        row = seq * task.rows + first_row + unit // _UNITS_OF_ROW
        quad = unit % _UNITS_OF_ROW * (_UNIT // 4) + lane
        cute.local_tile(task.out[row, None], (4,), (quad,)).store(rounded.load())
        if quad == 0:
            task.lse[row] = merged[0]


@cute.jit
def _clear(
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
) -> None:
    """What was collected is EMPTY again."""
    for i in cutlass.range_constexpr(num_units):
        for p in cutlass.range_constexpr(num_parts):
            if part + p * step < count and unit + i * stride < units:
                values_at, scores_at = _places(task, worker, part + p * step, unit + i * stride)
                cute.arch.inline_ptx(_CLEAR_FOUR, read_only_args=[values_at, Int32(EMPTY)])
                if cute.arch.lane_idx() < cutlass.const_expr(task.part_lse.shape[2] // 2):
                    cute.arch.inline_ptx(_CLEAR_TWO, read_only_args=[scores_at, Int32(EMPTY)])


@cute.jit
def _places(task: Task, worker: Int32, part: Int32, unit: Int32):
    """Addresses of a lane's four values and of its two logarithms."""
    starts = Int32(0)
    if part == 0:
        starts = Int32(1)
    units, scores = cutlass.const_expr(task.part_lse.shape[1]), cutlass.const_expr(task.part_lse.shape[2])
    idx = part_slot(worker + part, task.row_tiles, task.row_tile, starts) * units + unit
    lane = cute.arch.lane_idx()
    values_at = task.part_out.iterator.toint() + (idx * (4 * _UNIT) + lane * 16)
    return values_at, task.part_lse.iterator.toint() + (idx * (4 * scores) + lane % (scores // 2) * 8)


def _in_fragments(task):
    return task.part_lse.shape[2] == _ROWS_OF_FRAGMENT
