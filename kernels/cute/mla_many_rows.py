"""Latent decode of 64 query rows by two warpgroups that share two tiles at a time.

Of a pair of tiles the first is warpgroup 0's, the second warpgroup 1's: it scores the tile, makes the weights P in
registers and leaves them for the other one where the tile's rotated keys were. Both add P V of both tiles to the half
of the dims that they hold. The running maxima pass from one tile to the next, so that both halves have one scale.

In the order of the matrix units: both tiles' scores, beside the second of which warpgroup 0 makes its weights; P V of
the first tile, beside which warpgroup 1 makes its own; P V of the second tile, and at once the next scores.

Columns of a stage are freed by halves, as soon as their last product is done. Two CTAs with the row tiles of one
sequence may form a pair: each loads one half of the blocks into both.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from dist_infer.kernels.cute.mla_merge import merge_parts
from dist_infer.kernels.cute.mla_parts import leave_score, rows_of_part
from dist_infer.kernels.cute.mla_rows import ROWS_OF_WARP, write_rows
from dist_infer.kernels.cute.mla_shared_tiles import (
    HALF_DIMS,
    NUM_ROWS,
    add_product,
    await_weights,
    finish_product,
    group_of,
    halves,
    hand_over,
    place_of_thread,
    score,
    score_mma,
    value_mma,
    weigh,
    weights_memory,
)
from dist_infer.kernels.cute.mla_softmax import NOTHING, keys_seen, normalise
from dist_infer.kernels.cute.mla_tiles import NUM_BLOCKS, TILE, Task, part_slot, tiles_of

_PAIR_BARRIER = 3
_LAST_PLACE = NUM_BLOCKS - 1


@cute.jit
def attend_many_rows(
    pair: cutlass.Constexpr,
    keys: cute.Tensor,  # [token, column, stage * 9 + block]
    queries: cute.Tensor,  # [row, column]
    shared: cute.Tensor,  # [warpgroup, (running maximum, factor), row] of its last tile
    totals: cute.Tensor,  # [warpgroup, row]
    full: cute.Pointer,
    empty: cute.Pointer,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    p_full: cute.Pointer,
    duty: cute.Tensor,
    staging: cute.Pointer,  # the queries' memory
    scratch: cute.Tensor,  # for the merge, there too
    task: Task,
) -> None:
    """What the consumer warpgroups do with a worker's tiles."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta % 128
    group = cute.arch.make_warp_uniform(thread_of_cta // 128 - 1)
    row0, _ = place_of_thread()
    dtype = keys.element_type
    pv_own = value_mma(dtype, warpgroup.OperandSource.RMEM)
    pv_other = value_mma(dtype, warpgroup.OperandSource.SMEM)
    pv_own.set(warpgroup.Field.ACCUMULATE, True)
    pv_other.set(warpgroup.Field.ACCUMULATE, True)
    qk_thread = score_mma(dtype).get_slice(thread)
    own_thread, other_thread = pv_own.get_slice(thread), pv_other.get_slice(thread)
    probabilities = weights_memory(keys)
    f_q = qk_thread.make_fragment_A(qk_thread.partition_A(queries))
    f_k = qk_thread.make_fragment_B(qk_thread.partition_B(keys))
    f_v = own_thread.make_fragment_B(own_thread.partition_B(halves(keys)))[(None, None, None, group, None)]
    f_p = other_thread.make_fragment_A(other_thread.partition_A(probabilities))
    scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((NUM_ROWS, TILE)))
    sums = own_thread.make_fragment_C(own_thread.partition_shape_C((NUM_ROWS, HALF_DIMS)))
    weights = cute.make_rmem_tensor(scores.layout, dtype)
    # the accumulator's values of 16 tokens are the operand's values of one step
    operand_layout = cute.make_layout(((2, 2, 2), 1, TILE // 16), stride=((1, 2, 4), 0, 8))
    f_w = cute.make_tensor(weights.iterator, operand_layout)
    p0, p1 = f_p[(None, None, None, 0)], f_p[(None, None, None, 1)]
    v0, v1 = f_v[(None, None, None, 0)], f_v[(None, None, None, 1)]
    store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    store = cute.make_tiled_copy_C(store_atom, score_mma(dtype)).get_slice(thread)
    to_shared = store.partition_D(probabilities)
    total = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    factor = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    largest = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    seen = cute.make_rmem_tensor(cute.make_layout(2), Int32)
    phase0, phase1, q_phase = Int32(0), Int32(0), Int32(0)
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        tiles = tiles_of(task.kv_lens, seq)
        begin = first - before
        stop = cutlass.min(task.end - before, tiles)
        kv_len = task.kv_lens[seq]
        first_row = task.row_tile * NUM_ROWS
        masked_from = keys_seen(kv_len, first_row, task.rows, task.heads) // TILE
        for h in cutlass.range_constexpr(2):
            seen[h] = keys_seen(kv_len, first_row + row0 + 8 * h, task.rows, task.heads)
        total.fill(0.0)
        sums.fill(0.0)
        largest.fill(NOTHING)
        cute.arch.mbarrier_wait(q_full, q_phase)
        tile = begin
        if group == 0:
            while tile < stop:
                busy = tile > begin
                if busy:
                    await_weights(p_full, shared, 1, phase1, factor, largest, total)
                    add_product(pv_other, sums, factor, p1, v1)
                    phase1 ^= 1
                score(pair, dtype, 0, scores, f_q, f_k, full, phase0, empty, busy, tile + 1 < stop)
                weigh(scores, weights, total, largest, factor, shared, 0, tile, seen, masked_from, task)
                hand_over(keys, store, weights, to_shared, p_full, 0, tile, kv_len, thread)
                add_product(pv_own, sums, factor, f_w, v0)
                finish_product(pair, empty + group_of(0, 0))
                phase0 ^= 1
                tile += 2
            if (stop - begin) % 2 == 0:
                await_weights(p_full, shared, 1, phase1, factor, largest, total)
                add_product(pv_other, sums, factor, p1, v1)
                finish_product(pair, empty + group_of(1, _LAST_PLACE))
                phase1 ^= 1
        else:
            while tile < stop:
                in_pair = tile + 1 < stop
                if in_pair:
                    score(pair, dtype, 1, scores, f_q, f_k, full, phase1, empty, False, True)
                await_weights(p_full, shared, 0, phase0, factor, largest, total)
                add_product(pv_other, sums, factor, p0, v0)
                if in_pair:  # beside that product
                    weigh(scores, weights, total, largest, factor, shared, 1, tile + 1, seen, masked_from, task)
                    hand_over(keys, store, weights, to_shared, p_full, 1, tile + 1, kv_len, thread)
                finish_product(pair, empty + group_of(0, _LAST_PLACE))
                if in_pair:
                    add_product(pv_own, sums, factor, f_w, v1)
                    finish_product(pair, empty + group_of(1, 0))
                    phase1 ^= 1
                phase0 ^= 1
                tile += 2
        _write(sums, total, largest, totals, staging, thread_of_cta - 128, begin, stop, tiles, seq, task)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        q_phase ^= 1
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(False, task, duty, scratch)


@cute.jit
def _write(
    sums: cute.Tensor,
    total: cute.Tensor,
    largest: cute.Tensor,
    totals: cute.Tensor,
    staging: cute.Pointer,
    thread: Int32,
    begin: Int32,
    stop: Int32,
    tiles: Int32,
    seq: Int32,
    task: Task,
) -> None:
    """What has become of tiles [begin, stop) of a sequence: the result, or a part of it."""
    group, lane = cute.arch.make_warp_uniform(thread // 128), thread % 32
    first_row = cute.arch.make_warp_uniform(thread % 128 // 32) * ROWS_OF_WARP
    column = first_row + lane // 4
    inverses = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for h in cutlass.range_constexpr(2):
        summed = total[h]
        for step in cutlass.range_constexpr(2):
            summed += cute.arch.shuffle_sync_bfly(summed, 1 << step)
        if lane % 4 == 0:
            totals[group, column + 8 * h] = summed
    cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)  # the queries' memory is free, too
    whole = begin == 0 and stop == tiles
    starts = Int32(0)
    if begin == 0:
        starts = Int32(1)
    where = part_slot(task.worker, task.row_tiles, task.row_tile, starts)
    row0 = task.row_tile * NUM_ROWS
    for h in cutlass.range_constexpr(2):
        row = column + 8 * h
        inverses[h], logarithm = normalise(totals[0, row] + totals[1, row], largest[h])
        if group == 0 and lane % 4 == 0 and row0 + row < task.rows:
            if whole:
                task.lse[seq * task.rows + row0 + row] = logarithm
            else:
                leave_score(task, where, row, logarithm)
    warp = cute.arch.make_warp_uniform(thread // 32)
    count = cutlass.max(cutlass.min(task.rows - row0 - first_row, Int32(ROWS_OF_WARP)), Int32(0))
    if whole:
        row = seq * task.rows + row0 + first_row
        write_rows(sums, inverses, staging, warp, task.out, row, count, group, lane)
    else:
        wide = cute.recast_ptr(staging, dtype=Float32)
        write_rows(sums, inverses, wide, warp, rows_of_part(task, where), first_row, count, group, lane)
