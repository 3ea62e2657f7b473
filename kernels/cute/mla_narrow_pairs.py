"""Latent decode of 64 query rows over a cache of E4M3 by two warpgroups that share two tiles at a time.

As in mla_many_rows warpgroup 0 scores the first tile of a pair, warpgroup 1 the second one, the running maxima pass
from one tile to the next, and both warpgroups add the values of both tiles to the half of the dims that they hold. Here
the second product is transposed, O^T = V^T P^T, as in mla_narrow: so each byte of a value is widened once for all rows.
Warpgroup 0 scores its next tile before it adds the values of the second one: one warpgroup makes weights while the
other one keeps the matrix units busy. See mla_narrow_tiles for the steps.

A thread holds rows row0 and row0 + 8 of the scores, value v = i + 2 h + 4 j of them in row row0 + 8 h and of token
col0 + i + 8 j. Of the sums those are two dims of a block, and query rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warp

from dist_infer.kernels.cute.mla_few_rows import column_of
from dist_infer.kernels.cute.mla_merge import merge_parts
from dist_infer.kernels.cute.mla_narrow import write_columns
from dist_infer.kernels.cute.mla_narrow_keys import score_mma, split_queries
from dist_infer.kernels.cute.mla_narrow_tiles import (
    EXPONENT,
    HALF,
    Exchange,
    add_values,
    hand_over,
    score,
    take_factor,
    value_mma,
    weigh,
)
from dist_infer.kernels.cute.mla_operands import ROW_BYTES, SLOTS_OF_TILE
from dist_infer.kernels.cute.mla_parts import leave_fragments
from dist_infer.kernels.cute.mla_shared_tiles import NUM_ROWS
from dist_infer.kernels.cute.mla_softmax import NOTHING, normalise
from dist_infer.kernels.cute.mla_tiles import BLOCK, TILE, Task, part_slot, tiles_of

_PAIR_BARRIER = 3


@cute.jit
def attend_narrow_pairs(
    parts: cutlass.Constexpr,  # of a query
    num_slots: cutlass.Constexpr,
    base: Int32,  # slots of three blocks of [token, 64 bytes], swizzled by 64 bytes
    keys: cute.Tensor,  # the same memory, [token, byte, block]
    queries: cute.Tensor,  # [row, byte, block], both parts of 64 dims side by side
    query_words: cute.Tensor,  # the same memory, [word]
    query_scales: cute.Tensor,  # [row]
    probabilities: cute.Tensor,  # [row, token, warpgroup] in float16, swizzled by 128 bytes, or in E4M3, by 64
    totals: cute.Tensor,  # [warpgroup, row], on the queries' memory
    exchange: Exchange,
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
    warp_idx = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    row0, col0 = warp_idx * 16 + lane // 4, lane % 4 * 2
    qk_thread = score_mma(NUM_ROWS, TILE).get_slice(thread)
    rounds = cutlass.const_expr(parts == 1)
    pv_thread = value_mma(rounds).get_slice(thread)
    f_q = qk_thread.make_fragment_A(qk_thread.partition_A(queries))
    f_k = qk_thread.make_fragment_B(qk_thread.partition_B(keys))
    f_p = pv_thread.make_fragment_B(pv_thread.partition_B(probabilities))
    shape = qk_thread.partition_shape_C((NUM_ROWS, TILE))
    scores, later_scores = (qk_thread.make_fragment_C(shape) for _ in range(2))
    weights = cute.make_rmem_tensor(scores.layout, Float16)
    weight_words = cute.recast_tensor(cute.make_tensor(weights.iterator, cute.make_layout(TILE // 2)), Int32)
    weights_at = probabilities.iterator.toint()
    sums = [pv_thread.make_fragment_C(pv_thread.partition_shape_C((TILE, NUM_ROWS))) for _ in range(HALF)]
    store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    store = cute.make_tiled_copy_C(store_atom, score_mma(NUM_ROWS, TILE)).get_slice(thread)
    to_shared = probabilities
    if cutlass.const_expr(not rounds):
        to_shared = store.partition_D(probabilities)
    value_row = lane * ROW_BYTES + (warp_idx ^ (lane // 2 % 4)) * 16
    total = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    largest = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    scales = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    scores_of_rows = cute.make_rmem_tensor(cute.make_layout(NUM_ROWS // 4), Float32)
    shared = exchange.shared
    slot, phase, q_phase = Int32(0), Int32(0), Int32(0)
    phase0, phase1 = Int32(0), Int32(0)
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        tiles = tiles_of(task.kv_lens, seq)
        begin = first - before
        stop = cutlass.min(task.end - before, tiles)
        kv_len = task.kv_lens[seq]
        total.fill(0.0)
        largest.fill(NOTHING)
        for block in cutlass.range_constexpr(HALF):
            sums[block].fill(0.0)
        cute.arch.mbarrier_wait(q_full, q_phase)
        q_phase ^= 1
        split_queries(NUM_ROWS, query_words, query_scales)
        for h in cutlass.range_constexpr(2):
            scales[h] = query_scales[row0 + 8 * h] * task.scale
        tile = begin
        left = kv_len - tile * TILE  # keys from this tile on
        if group == 0:
            score(parts, num_slots, scores, later_scores, f_q, f_k, exchange, slot, phase)
        while tile < stop:
            slot1, ring_phase1 = _after(slot, phase, 1, num_slots)
            slot2, ring_phase2 = _after(slot, phase, 2, num_slots)
            if group == 0:
                cute.arch.mbarrier_wait(exchange.p_empty, phase0 ^ 1)
                weigh(rounds, 0, scores, weight_words, total, largest, exchange, scales, tile, row0, col0, kv_len, task)
                hand_over(rounds, 0, store, weights, weight_words, to_shared, weights_at, row0, exchange)
                add_values(
                    rounds, 0, 0, num_slots, sums, f_p, exchange, base, value_row, slot, phase, phase0, left, col0
                )
                if tile + 2 < stop:
                    score(parts, num_slots, scores, later_scores, f_q, f_k, exchange, slot2, ring_phase2)
                if tile + 1 < stop:
                    add_values(
                        *(rounds, 0, 1, num_slots, sums, f_p, exchange, base, value_row),
                        *(slot1, ring_phase1, phase1, left - TILE, col0),
                    )
                    take_factor(shared, 1, row0, largest, total)
            else:
                if tile + 1 < stop:
                    score(parts, num_slots, scores, later_scores, f_q, f_k, exchange, slot1, ring_phase1)
                add_values(
                    rounds, 1, 0, num_slots, sums, f_p, exchange, base, value_row, slot, phase, phase0, left, col0
                )
                take_factor(shared, 0, row0, largest, total)
                if tile + 1 < stop:
                    cute.arch.mbarrier_wait(exchange.p_empty + 1, phase1 ^ 1)
                    weigh(
                        *(rounds, 1, scores, weight_words, total, largest, exchange, scales, tile + 1),
                        *(row0, col0, kv_len, task),
                    )
                    hand_over(rounds, 1, store, weights, weight_words, to_shared, weights_at, row0, exchange)
                    add_values(
                        *(rounds, 1, 1, num_slots, sums, f_p, exchange, base, value_row),
                        *(slot1, ring_phase1, phase1, left - TILE, col0),
                    )
            phase0 ^= 1
            if tile + 1 < stop:
                phase1 ^= 1
                slot, phase = slot2, ring_phase2
            else:
                slot, phase = slot1, ring_phase1
            tile += 2
            left -= 2 * TILE
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)  # the queries' memory is free
        for h in cutlass.range_constexpr(2):
            summed = total[h]
            for step in cutlass.range_constexpr(2):
                summed += cute.arch.shuffle_sync_bfly(summed, 1 << step)
            if lane % 4 == 0:
                totals[group, row0 + 8 * h] = summed
                if group == 0:
                    shared[0, 0, row0 + 8 * h] = largest[h]
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        whole = begin == 0 and stop == tiles
        starts = Int32(0)
        if begin == 0:
            starts = Int32(1)
        where = part_slot(task.worker, task.row_tiles, task.row_tile, starts)
        for c in cutlass.range_constexpr(NUM_ROWS // 4):
            column = column_of(col0, c)
            inverse, scores_of_rows[c] = normalise(
                totals[0, column] + totals[1, column], shared[0, 0, column] - EXPONENT[rounds]
            )
            for block in cutlass.range_constexpr(HALF):
                for h in cutlass.range_constexpr(2):
                    v = cutlass.const_expr(c % 2 + 2 * h + c // 2 * 4)
                    sums[block][v] = sums[block][v] * inverse * task.value_scale
        if whole:
            dim0 = HALF * group * BLOCK + warp_idx * 16 + lane // 4 * 2
            write_columns(NUM_ROWS, task, sums, scores_of_rows, seq, col0, dim0)
        else:
            first_unit = (HALF * group * 4 + warp_idx) * (NUM_ROWS // 8)
            leave_fragments(NUM_ROWS, task, sums, scores_of_rows, where, first_unit, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(True, task, duty, scratch)


@cute.jit
def _after(slot: Int32, phase: Int32, tiles: cutlass.Constexpr, num_slots: cutlass.Constexpr):
    """(slot, phase) of so many tiles later, at most once round."""
    later, later_phase = slot + tiles * SLOTS_OF_TILE, phase
    if later >= num_slots:
        later -= num_slots
        later_phase ^= 1
    return later, later_phase
