"""The parts of a sequence that several CTAs worked on become one, in the launch that made them.

A warp of each CTA, the clerk, counts the CTA in once its part of a sequence is written. In all CTAs that have nothing
after that part it then waits until everybody has come, and the consumers merge a share of the rows. Nothing promises
that all CTAs of a launch run at once: two launches may hold one half of the multiprocessors each. So a clerk waits for
a bounded time only. After that its share is left to those that see all parts there: each of them merges everything.
The last clerk to leave clears the state for the next launch.

The state of a sequence is one word: arrived, left and given up, ten bits each.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, normalise
from dist_infer.kernels.cute.mla_tiles import LATENT, Task, part_slot, parts_of, tiles_of

MAX_CTAS = 1024
NUM_WARPS = 8  # of the consumers
SCRATCH = 129 * NUM_WARPS  # floats
DUTY = (2, 5)  # of a sequence that was only finished here, of the last one
_CONSUMERS = 32 * NUM_WARPS
_MERGE_BARRIER = 3
_END_BARRIER, _CUT_BARRIER, _DUTY_BARRIER = 4, 5, 6
_BITS = 10
_ONE = 1 << _BITS
_LEFT = 1 << _BITS
_GAVE_UP = 1 << 2 * _BITS
_PATIENCE = 1 << 15  # looks at the state, about half a microsecond each
_FEW_PARTS = 16
_UNIT = 128  # dims of a row that a warp merges, 4 a lane
_UNITS_OF_ROW = LATENT // _UNIT


def workspace_size(rows: int, num_ctas: int) -> int:
    """In 32-bit words, for parts of up to so many rows. The first MAX_CTAS are the states."""
    return MAX_CTAS + 2 * num_ctas * rows * (LATENT + 1)


@cute.jit
def parts_in(workspace: Int64, rows: cutlass.Constexpr, num_ctas: Int32):
    """(values [part, row, dim], logarithms [part, row], states [CTA]) at an address."""
    arrivals = cute.make_ptr(Int32, workspace, cute.AddressSpace.gmem, assumed_align=4)
    lse = workspace + 4 * MAX_CTAS
    out = cute.make_ptr(Float32, lse + num_ctas * (8 * rows), cute.AddressSpace.gmem, assumed_align=16)
    return (
        cute.make_tensor(out, cute.make_layout((2 * num_ctas, rows, LATENT), stride=(rows * LATENT, LATENT, 1))),
        cute.make_tensor(
            cute.make_ptr(Float32, lse, cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout((2 * num_ctas, rows), stride=(rows, 1)),
        ),
        cute.make_tensor(arrivals, cute.make_layout(num_ctas)),
    )


@cute.jit
def hand_in(ends: cutlass.Boolean) -> None:
    """A consumer has written its values of a part, which has the sequence's end or not. It does not wait."""
    if ends:
        cute.arch.barrier_arrive(barrier_id=_END_BARRIER, number_of_threads=_CONSUMERS + 32)
    else:
        cute.arch.barrier_arrive(barrier_id=_CUT_BARRIER, number_of_threads=_CONSUMERS + 32)


@cute.jit
def keep_count(task: Task, duty: cute.Tensor) -> None:
    """The clerk: leaves what the consumers merge at the end in duty = [first unit, step, sequence, worker, parts]."""
    lane = cute.arch.lane_idx()
    duty[0, 1] = Int32(0)
    duty[1, 1] = Int32(0)
    farewell = Int32(0)
    of_last = Int32(0)
    state = task.arrivals.iterator
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        tiles = tiles_of(task.kv_lens, seq)
        stop = cutlass.min(task.end - before, tiles)
        if first > before or stop < tiles:
            if stop == tiles:
                cute.arch.barrier(barrier_id=_END_BARRIER, number_of_threads=_CONSUMERS + 32)
            else:
                cute.arch.barrier(barrier_id=_CUT_BARRIER, number_of_threads=_CONSUMERS + 32)
            worker, count = parts_of(before, tiles, task.chunk)
            state = task.arrivals.iterator + (worker * task.row_tiles + task.row_tile)
            kind, begin, step = Int32(0), Int32(0), Int32(0)
            if before + stop < task.end:
                if lane == 0:
                    begin, step = _leave_part(state, count)
            else:
                kind = Int32(1)
                of_last = count
                shares = count  # all but a CTA with the end that goes on to other sequences
                if before + tiles != task.total and (before + tiles) % task.chunk > 0:
                    shares -= 1
                if lane == 0:
                    begin, step, farewell = _await_parts(state, task.worker - worker, count, shares)
            if lane == 0:
                duty[kind, 0] = begin
                duty[kind, 1] = step
                duty[kind, 2] = seq
                duty[kind, 3] = worker
                duty[kind, 4] = count
        first = before + stop
        before += tiles
        seq += 1
    cute.arch.barrier_arrive(barrier_id=_DUTY_BARRIER, number_of_threads=_CONSUMERS + 32)
    if farewell > 0:
        left = cute.arch.atomic_add(state, farewell, sem="acq_rel", scope="gpu")
        if left // _LEFT % _ONE + 1 == of_last:
            cute.arch.store(state, Int32(0))


@cute.jit
def _leave_part(state: cute.Pointer, count: Int32):
    """(first unit, step) of a CTA that doesn't wait: nothing, or all if it is the last and others have given up."""
    step = Int32(0)
    cute.arch.fence_acq_rel_gpu()
    seen = cute.arch.atomic_add(state, Int32(1 + _LEFT), sem="acq_rel", scope="gpu")
    if seen % _ONE + 1 == count:
        if seen // _GAVE_UP > 0:
            step = Int32(1)
        if seen // _LEFT % _ONE + 1 == count:
            cute.arch.store(state, Int32(0))
    return Int32(0), step


@cute.jit
def _await_parts(state: cute.Pointer, part: Int32, count: Int32, shares: Int32):
    """(first unit, step, how to leave): a share, everything if others have given up, or nothing after too long."""
    cute.arch.fence_acq_rel_gpu()
    cute.arch.red(state, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
    now = cute.arch.load(state, Int32, sem="acquire", scope="gpu")
    looks = Int32(1)
    while now % _ONE != count and looks < _PATIENCE:
        now = cute.arch.load(state, Int32, sem="acquire", scope="gpu")
        looks += 1
    begin, step, farewell = part, shares, Int32(_LEFT)
    if now % _ONE != count:
        now = cute.arch.atomic_add(state, Int32(_LEFT + _GAVE_UP), sem="acq_rel", scope="gpu")
        farewell = Int32(0)
        if now % _ONE != count:
            step = Int32(0)
        elif now // _LEFT % _ONE + 1 == count:
            cute.arch.store(state, Int32(0))
    if step > 0 and now // _GAVE_UP > 0:
        begin, step = Int32(0), Int32(1)
    return begin, step, farewell


@cute.jit
def merge_parts(task: Task, duty: cute.Tensor, scratch: cute.Tensor) -> None:
    """What the consumers merge, when their own tiles are done."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta - 128
    lane = thread % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    tile_rows = cutlass.const_expr(task.part_lse.shape[1])
    units = cutlass.min(task.rows - task.row_tile * tile_rows, Int32(tile_rows)) * _UNITS_OF_ROW
    cute.arch.barrier(barrier_id=_DUTY_BARRIER, number_of_threads=_CONSUMERS + 32)
    for kind in cutlass.range(2, unroll=1):
        begin, step, seq, worker, count = (cute.arch.make_warp_uniform(duty[kind, place]) for place in range(5))
        by_warp = count <= _FEW_PARTS or (count <= 32 and step * NUM_WARPS <= units)
        if step > 0 and by_warp:
            unit = begin + step * warp
            stride = step * NUM_WARPS
            while unit + 2 * stride < units:
                _merge_by_warp(8, 2, task, worker, count, seq, unit, stride, units, lane)
                unit += 8 * stride
            while unit < units:
                _merge_by_warp(1, 8, task, worker, count, seq, unit, stride, units, lane)
                unit += stride
        if step > 0 and not by_warp:
            unit = begin
            while unit < units:
                _merge_by_cta(task, scratch, worker, count, seq, unit, lane, warp)
                unit += step


@cute.jit
def _merge_by_warp(
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    task: Task,
    worker: Int32,
    count: Int32,
    seq: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
    lane: Int32,
) -> None:
    """Units unit + i * stride; lane p knows the weights of part p. Loads of so many parts are under way at once."""
    weights = cute.make_rmem_tensor(cute.make_layout(num_units), Float32)
    totals = cute.make_rmem_tensor(cute.make_layout(num_units), Float32)
    references = cute.make_rmem_tensor(cute.make_layout(num_units), Float32)
    values = cute.make_rmem_tensor(cute.make_layout((4, num_units)), Float32)
    loaded = cute.make_rmem_tensor(cute.make_layout((4, num_units, num_parts)), Float32)
    rounded = cute.make_rmem_tensor(cute.make_layout(4), task.out.element_type)
    values.fill(0.0)
    weights.fill(NOTHING)
    if lane < count:
        slot = _slot(task, worker, lane)
        for i in cutlass.range_constexpr(num_units):
            weights[i] = task.part_lse[slot, cutlass.min(unit + i * stride, units - 1) // _UNITS_OF_ROW]
    for i in cutlass.range_constexpr(num_units):
        references[i] = finite(cute.arch.warp_reduction(weights[i], lambda x, y: cute.arch.fmax(x, y)))
        weights[i] = exp2(weights[i] - references[i])
        totals[i] = cute.arch.warp_reduction(weights[i], lambda x, y: x + y)
    part = Int32(0)
    while part < count:
        for p in cutlass.range_constexpr(num_parts):
            slot = _slot(task, worker, cutlass.min(part + p, count - 1))
            for i in cutlass.range_constexpr(num_units):
                quad = _load(task, slot, cutlass.min(unit + i * stride, units - 1), lane)
                for idx in cutlass.range_constexpr(4):
                    loaded[idx, i, p] = quad[idx]
        for p in cutlass.range_constexpr(num_parts):
            for i in cutlass.range_constexpr(num_units):
                weight = cute.arch.shuffle_sync(weights[i], part + p)  # 0 beyond the last part
                for idx in cutlass.range_constexpr(4):
                    values[idx, i] += weight * loaded[idx, i, p]
        part += num_parts
    for i in cutlass.range_constexpr(num_units):
        own = unit + i * stride
        if own < units:
            inverse, merged = normalise(totals[i], references[i])
            row = _row_of_call(task, seq, own)
            for idx in cutlass.range_constexpr(4):
                rounded[idx] = (values[idx, i] * inverse).to(task.out.element_type)
            quad_idx = own % _UNITS_OF_ROW * (_UNIT // 4) + lane
            cute.local_tile(task.out[row, None], (4,), (quad_idx,)).store(rounded.load())
            if lane == 0 and own % _UNITS_OF_ROW == 0:
                task.lse[row] = merged


@cute.jit
def _merge_by_cta(
    task: Task,
    scratch: cute.Tensor,
    worker: Int32,
    count: Int32,
    seq: Int32,
    unit: Int32,
    lane: Int32,
    warp: Int32,
) -> None:
    """The warps share the parts."""
    sums = cute.make_tensor(scratch.iterator, cute.make_layout((_UNIT, NUM_WARPS)))
    weights = cute.make_tensor(scratch.iterator + _UNIT * NUM_WARPS, cute.make_layout(NUM_WARPS))
    row = unit // _UNITS_OF_ROW
    largest = Float32(NOTHING)
    part = lane
    while part < count:
        largest = cute.arch.fmax(largest, task.part_lse[_slot(task, worker, part), row])
        part += 32
    reference = finite(cute.arch.warp_reduction(largest, lambda x, y: cute.arch.fmax(x, y)))
    values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    values.fill(0.0)
    weight_sum = Float32(0.0)
    for turn in cutlass.range((count + NUM_WARPS - 1 - warp) // NUM_WARPS, unroll=8):
        slot = _slot(task, worker, warp + NUM_WARPS * turn)
        weight = exp2(task.part_lse[slot, row] - reference)
        weight_sum += weight
        loaded = _load(task, slot, unit, lane)
        for idx in cutlass.range_constexpr(4):
            values[idx] += weight * loaded[idx]
    for idx in cutlass.range_constexpr(4):
        sums[lane * 4 + idx, warp] = values[idx]
    if lane == 0:
        weights[warp] = weight_sum
    cute.arch.barrier(barrier_id=_MERGE_BARRIER, number_of_threads=_CONSUMERS)
    thread = warp * 32 + lane
    if thread < _UNIT:
        total = Float32(0.0)
        value = Float32(0.0)
        for other in cutlass.range_constexpr(NUM_WARPS):
            total += weights[other]
            value += sums[thread, other]
        inverse, merged = normalise(total, reference)
        row_of_call = _row_of_call(task, seq, unit)
        dim = unit % _UNITS_OF_ROW * _UNIT + thread
        task.out[row_of_call, dim] = (value * inverse).to(task.out.element_type)
        if thread == 0 and unit % _UNITS_OF_ROW == 0:
            task.lse[row_of_call] = merged
    cute.arch.barrier(barrier_id=_MERGE_BARRIER, number_of_threads=_CONSUMERS)


@cute.jit
def _slot(task: Task, worker: Int32, part: Int32) -> Int32:
    starts = Int32(0)
    if part == 0:
        starts = Int32(1)
    return part_slot(worker + part, task.row_tiles, task.row_tile, starts)


@cute.jit
def _row_of_call(task: Task, seq: Int32, unit: Int32) -> Int32:
    return seq * task.rows + task.row_tile * cutlass.const_expr(task.part_lse.shape[1]) + unit // _UNITS_OF_ROW


@cute.jit
def _load(task: Task, slot: Int32, unit: Int32, lane: Int32):
    quad = unit % _UNITS_OF_ROW * (_UNIT // 4) + lane
    return cute.local_tile(task.part_out[slot, unit // _UNITS_OF_ROW, None], (4,), (quad,)).load()
