"""Latent decode of up to 32 query rows over a cache of E4M3.

As in mla_few_rows the products are transposed and two warpgroups take alternate tiles. Here a tile stays in shared
memory as bytes: the matrix units read its keys there (mla_narrow_keys). Of the values a warp loads the bytes of its own
dims, widens them to float16, which holds every E4M3, and gives them as the left operand of O^T = V^T P^T. Two sets of
registers alternate, so that one is filled while the other is read, and bytes are loaded some turns ahead.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.mla_few_rows import column_of, largest_of_warp, mask
from dist_infer.kernels.cute.mla_merge import merge_parts
from dist_infer.kernels.cute.mla_narrow_keys import multiply_slot, score_mma, split_queries
from dist_infer.kernels.cute.mla_operands import (
    ROW_BYTES,
    SLOTS_OF_TILE,
    STEPS,
    WEIGHT_BYTES,
    WEIGHT_EXPONENT,
    clear_values,
    load_values,
    store_weights,
    widen_values,
)
from dist_infer.kernels.cute.mla_parts import leave_fragments
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, normalise
from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_LATENT_BLOCKS, TILE, Task, part_slot, tiles_of, wrapped

NUM_SLOTS = 4 * SLOTS_OF_TILE  # each is always of the same warpgroup, see mla_few_rows.attend_few_rows
_HALF = NUM_LATENT_BLOCKS // 2
_PAIR_BARRIER = 3
_TURN = 2  # blocks that are exchanged at once
_LAST_TURNS = (3, 5, 7)  # of the values of each slot


def narrow_mma(rows):
    """64 tokens or dims, from registers, by so many query rows."""
    op = warpgroup.MmaF16BF16Op(
        Float16,
        Float32,
        (TILE, rows, 16),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def attend_narrow(
    num_rows: cutlass.Constexpr,
    parts: cutlass.Constexpr,  # of a query
    num_slots: cutlass.Constexpr,
    ring: cute.Pointer,  # slots of three blocks of [token, 64 bytes], swizzled by 64 bytes
    keys: cute.Tensor,  # the same memory, [token, byte, block]
    queries: cute.Tensor,  # [row, byte, block], both parts of 64 dims side by side
    query_words: cute.Tensor,  # the same memory, [word]
    query_scales: cute.Tensor,  # [row]
    probabilities: cute.Tensor,  # [row, token, warpgroup] in float16, swizzled by 128 bytes
    weights_memory: cute.Pointer,  # the same
    maxima: cute.Tensor,  # [warpgroup, parity, warp, row]
    stats: cute.Tensor,  # [warpgroup, sum of each warp and then the maximum, row]
    exchange: cute.Tensor,  # [thread, value, block, warpgroup], on the queries' memory
    full: cute.Pointer,
    empty: cute.Pointer,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    duty: cute.Tensor,
    scratch: cute.Tensor,  # for the merge, on the queries' memory
    task: Task,
) -> None:
    """What the consumer warpgroups do with a worker's tiles."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta % 128
    group = cute.arch.make_warp_uniform(thread_of_cta // 128 - 1)
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    row0, col0 = warp * 16 + lane // 4, lane % 4 * 2
    num_columns = cutlass.const_expr(num_rows // 4)
    mma = narrow_mma(num_rows)
    mma_thread = mma.get_slice(thread)
    qk = score_mma(TILE, num_rows)
    qk_thread = qk.get_slice(thread)
    f_k = qk_thread.make_fragment_A(qk_thread.partition_A(keys))
    f_q = qk_thread.make_fragment_B(qk_thread.partition_B(queries))
    f_p = mma_thread.make_fragment_B(mma_thread.partition_B(probabilities))[(None, None, None, group)]
    shape = mma_thread.partition_shape_C((TILE, num_rows))
    scores, *later_scores = (mma_thread.make_fragment_C(shape) for _ in range(SLOTS_OF_TILE))
    sums = [mma_thread.make_fragment_C(shape) for _ in range(NUM_LATENT_BLOCKS)]
    halves = [mma_thread.make_fragment_C(mma_thread.partition_shape_C((TILE, num_rows))) for _ in range(_HALF)]
    widened = [cute.make_rmem_tensor(cute.make_layout(8 * STEPS), Float16) for _ in range(2)]
    words = [cute.recast_tensor(operand, Int32) for operand in widened]
    depth = cutlass.const_expr(2 if num_rows == 32 else 3)
    loaded = [cute.make_rmem_tensor(cute.make_layout(8), Int32) for _ in range(depth)]
    operand_layout = cute.make_layout(((2, 2, 2), 1, STEPS), stride=((1, 2, 4), 0, 8))
    f_a = [cute.make_tensor(operand.iterator, operand_layout) for operand in widened]
    # where a lane's row of 16 bytes begins in a block
    value_row = lane * ROW_BYTES + (warp ^ (lane // 2 % 4)) * 16
    base = ring.toint()
    # where it stores its row of 8 tokens: of query row lane % 8 and later ones
    weight_row = weights_memory.toint() + (group * num_rows + lane // 16 * 8 + lane % 8) * WEIGHT_BYTES
    weight_row += ((warp * 2 + lane // 8 % 2) ^ (lane % 8)) * 16
    maximum = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    total = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    factor = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    scales = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    scores_of_rows = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    slot, phase = Int32(0), Int32(0)
    counter, parity, q_phase = Int32(0), Int32(0), Int32(0)
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        tiles = tiles_of(task.kv_lens, seq)
        begin = first - before
        stop = cutlass.min(task.end - before, tiles)
        kv_len = task.kv_lens[seq]
        maximum.fill(NOTHING)
        total.fill(0.0)
        for block in cutlass.range_constexpr(NUM_LATENT_BLOCKS):
            sums[block].fill(0.0)
        cute.arch.mbarrier_wait(q_full, q_phase)
        q_phase ^= 1
        split_queries(num_rows, query_words, query_scales)
        for c in cutlass.range_constexpr(num_columns):
            scales[c] = query_scales[column_of(col0, c)] * task.scale
        tile = begin
        while tile < stop:
            if counter % 2 == group:
                token0 = tile * TILE
                # S^T = K Q^T
                for part in cutlass.range_constexpr(SLOTS_OF_TILE):
                    at = wait_for(full, slot, phase, part, num_slots)
                    into = (scores, *later_scores)[part]
                    multiply_slot(True, parts, qk, into, f_k, f_q, at, part)
                warpgroup.wait_group(0)
                for v in cutlass.range_constexpr(num_rows // 2):
                    scores[v] = scores[v] + later_scores[0][v] + later_scores[1][v]
                mask(num_rows, scores, token0, row0, col0, kv_len, task)
                # P^T
                for c in cutlass.range_constexpr(num_columns):
                    largest = largest_of_warp(scores, c) * scales[c]
                    if lane < 4:
                        maxima[group, parity, warp, column_of(col0, c)] = largest
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                if token0 + TILE > kv_len:  # all have read their keys
                    clear_values((0, NUM_LATENT_BLOCKS), base, slot, num_slots, value_row, kv_len - token0)
                for ahead in cutlass.range_constexpr(depth - 1):
                    load_values(ahead, base, slot, num_slots, value_row, loaded[ahead])
                for c in cutlass.range_constexpr(num_columns):
                    column = column_of(col0, c)
                    largest = maximum[c]
                    for other in cutlass.range_constexpr(4):
                        largest = cute.arch.fmax(largest, maxima[group, parity, other, column])
                    reference = finite(largest)
                    factor[c] = exp2(maximum[c] - reference)
                    maximum[c] = largest
                    total[c] = total[c] * factor[c]
                    for h in cutlass.range_constexpr(2):
                        v = cutlass.const_expr(c % 2 + 2 * h + c // 2 * 4)
                        scores[v] = exp2(scores[v] * scales[c] - (reference - WEIGHT_EXPONENT))
                        total[c] += scores[v]
                store_weights(num_rows, scores, weight_row)
                parity ^= 1
                widen_values(loaded[0], words[0])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                _multiply(num_rows, sums, factor)
                # O^T += V^T P^T
                mma.set(warpgroup.Field.ACCUMULATE, True)
                for turn in cutlass.range_constexpr(NUM_LATENT_BLOCKS):
                    later = cutlass.const_expr(turn + depth - 1)
                    if cutlass.const_expr(later < NUM_LATENT_BLOCKS):
                        load_values(later, base, slot, num_slots, value_row, loaded[later % depth])
                    if cutlass.const_expr(turn > 0):
                        widen_values(loaded[turn % depth], words[turn % 2])
                    if cutlass.const_expr(turn in _LAST_TURNS):
                        release(empty + wrapped(slot + _LAST_TURNS.index(turn), num_slots))
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(2):
                        for idx in cutlass.range_constexpr(2):
                            block = cutlass.const_expr(turn // 2 * 2 + idx)
                            p_step = f_p[(None, None, turn % 2 * 2 + k)]
                            cute.gemm(mma, sums[block], f_a[turn % 2][(None, None, idx * 2 + k)], p_step, sums[block])
                    warpgroup.commit_group()
                    warpgroup.wait_group(1 if turn + 1 < NUM_LATENT_BLOCKS else 0)
            counter += 1
            slot += SLOTS_OF_TILE
            if slot >= num_slots:
                slot -= num_slots
                phase ^= 1
            tile += 1
        # the two warpgroups become one
        for c in cutlass.range_constexpr(num_columns):
            summed = total[c]
            for step in cutlass.range_constexpr(3):
                summed += cute.arch.shuffle_sync_bfly(summed, 4 << step)
            if lane < 4:
                stats[group, warp, column_of(col0, c)] = summed
                if warp == 0:
                    stats[group, 4, column_of(col0, c)] = maximum[c]
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        whole = begin == 0 and stop == tiles
        starts = Int32(0)
        if begin == 0:
            starts = Int32(1)
        where = part_slot(task.worker, task.row_tiles, task.row_tile, starts)
        for c in cutlass.range_constexpr(num_columns):
            column = column_of(col0, c)
            both = cute.arch.fmax(stats[0, 4, column], stats[1, 4, column])
            reference = finite(both)
            summed = Float32(0.0)
            for g in cutlass.range_constexpr(2):
                of_group = stats[g, 0, column] + stats[g, 1, column] + stats[g, 2, column] + stats[g, 3, column]
                summed += of_group * exp2(stats[g, 4, column] - reference)
            inverse, scores_of_rows[c] = normalise(summed, both - WEIGHT_EXPONENT)
            factor[c] = exp2(maximum[c] - reference) * inverse * task.value_scale
        _multiply(num_rows, sums, factor)
        for turn in cutlass.range_constexpr(0, _HALF, _TURN):  # each gives the other half of the dims away
            for idx in cutlass.range_constexpr(_TURN):
                for v in cutlass.range_constexpr(num_rows // 2):
                    given = sums[turn + idx][v]
                    if group == 0:
                        given = sums[_HALF + turn + idx][v]
                    exchange[thread, v, idx, group] = given
            cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
            for idx in cutlass.range_constexpr(_TURN):
                for v in cutlass.range_constexpr(num_rows // 2):
                    kept = sums[_HALF + turn + idx][v]
                    if group == 0:
                        kept = sums[turn + idx][v]
                    halves[turn + idx][v] = kept + exchange[thread, v, idx, 1 - group]
            cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        if whole:
            write_columns(
                num_rows, task, halves, scores_of_rows, seq, col0, _HALF * group * BLOCK + warp * 16 + lane // 4 * 2
            )
        else:
            first_unit = (_HALF * group * 4 + warp) * (num_rows // 8)
            leave_fragments(num_rows, task, halves, scores_of_rows, where, first_unit, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(True, task, duty, scratch)


@cute.jit
def wait_for(full: cute.Pointer, slot: Int32, phase: Int32, place: cutlass.Constexpr, num_slots: cutlass.Constexpr):
    """The slot of a tile's first, second or third part, once it is there."""
    at, at_phase = slot + place, phase
    if at >= num_slots:
        at -= num_slots
        at_phase ^= 1
    cute.arch.mbarrier_wait(full + at, at_phase)
    return at


@cute.jit
def release(barrier: cute.Pointer) -> None:
    """A warp is done with a slot."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _multiply(num_rows: cutlass.Constexpr, sums, factor: cute.Tensor) -> None:
    """Most tiles raise no maximum: their warps skip it."""
    raised = factor[0] != 1.0
    for c in cutlass.range_constexpr(1, num_rows // 4):
        raised = raised or factor[c] != 1.0
    if cute.arch.vote_any_sync(raised):
        for block in cutlass.range_constexpr(NUM_LATENT_BLOCKS):
            for v in cutlass.range_constexpr(num_rows // 2):
                sums[block][v] = sums[block][v] * factor[v % 2 + v // 4 * 2]


@cute.jit
def write_columns(
    num_rows: cutlass.Constexpr, task: Task, halves, scores: cute.Tensor, seq: Int32, col0: Int32, dim0: Int32
) -> None:
    """A thread's values of half of the dims, and logarithms, to the call's output."""
    values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for c in cutlass.range_constexpr(num_rows // 4):
        row = task.row_tile * num_rows + column_of(col0, c)
        if row < task.rows:
            twos = cute.local_tile(task.out[seq * task.rows + row, None], (2,), (None,))
            for block in cutlass.range_constexpr(_HALF):
                for h in cutlass.range_constexpr(2):
                    values[h] = halves[block][c % 2 + 2 * h + c // 2 * 4]
                twos[None, dim0 // 2 + block * (BLOCK // 2)].store(values.load().to(task.out.element_type))
            if dim0 == 0:
                task.lse[seq * task.rows + row] = scores[c]
