"""Latent decode of 64 query rows over a cache of E4M3 by two warpgroups that share two tiles at a time.

As in mla_many_rows warpgroup 0 scores the first tile of a pair, warpgroup 1 the second one, the running maxima pass
from one tile to the next, and both warpgroups add the values of both tiles to the half of the dims that they hold. Here
the second product is transposed, O^T = V^T P^T, as in mla_narrow: so each byte of a value is widened once for all rows.
Warpgroup 0 scores its next tile before it adds the values of the second one: one warpgroup makes weights while the
other one keeps the matrix units busy.

A thread holds rows row0 and row0 + 8 of the scores, value v = i + 2 h + 4 j of them in row row0 + 8 h and of token
col0 + i + 8 j. Of the sums those are two dims of a block, and query rows.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from dist_infer.kernels.cute.mla_few_rows import column_of
from dist_infer.kernels.cute.mla_merge import leave_score, merge_parts
from dist_infer.kernels.cute.mla_narrow import narrow_mma, release, wait_for, write_columns
from dist_infer.kernels.cute.mla_narrow_keys import multiply_slot, score_mma, split_queries
from dist_infer.kernels.cute.mla_operands import (
    ROW_BYTES,
    SLOTS_OF_TILE,
    STEPS,
    WEIGHT_EXPONENT,
    clear_values,
    load_values,
    pack,
    widen_values,
)
from dist_infer.kernels.cute.mla_shared_tiles import NUM_ROWS, largest_of_row
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, keys_seen, normalise
from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_LATENT_BLOCKS, TILE, Task, part_slot, tiles_of, wrapped

_PAIR_BARRIER = 3
_SLACK = 8  # a maximum that is raised by less stays, so that few tiles have sums multiplied
_EXPONENT = WEIGHT_EXPONENT - _SLACK
_HALF = NUM_LATENT_BLOCKS // 2


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the warpgroups leave in shared memory for both, and the barriers."""

    shared: cute.Tensor  # [warpgroup, (running maximum, factor), row] of its last tile
    raised: cute.Tensor  # [warp, warpgroup], not 0 if a factor isn't 1
    full: cute.Pointer
    empty: cute.Pointer
    p_full: cute.Pointer
    p_empty: cute.Pointer


@cute.jit
def attend_narrow_pairs(
    parts: cutlass.Constexpr,  # of a query
    num_slots: cutlass.Constexpr,
    base: Int32,  # slots of three blocks of [token, 64 bytes], swizzled by 64 bytes
    keys: cute.Tensor,  # the same memory, [token, byte, block]
    queries: cute.Tensor,  # [row, byte, block], both parts of 64 dims side by side
    query_words: cute.Tensor,  # the same memory, [word]
    query_scales: cute.Tensor,  # [row]
    probabilities: cute.Tensor,  # [row, token, warpgroup] in float16, swizzled by 128 bytes
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
    pv_thread = narrow_mma(NUM_ROWS).get_slice(thread)
    f_q = qk_thread.make_fragment_A(qk_thread.partition_A(queries))
    f_k = qk_thread.make_fragment_B(qk_thread.partition_B(keys))
    f_p = pv_thread.make_fragment_B(pv_thread.partition_B(probabilities))
    shape = qk_thread.partition_shape_C((NUM_ROWS, TILE))
    scores, later_scores = (qk_thread.make_fragment_C(shape) for _ in range(2))
    weights = cute.make_rmem_tensor(scores.layout, Float16)
    weight_words = cute.recast_tensor(cute.make_tensor(weights.iterator, cute.make_layout(TILE // 2)), Int32)
    sums = [pv_thread.make_fragment_C(pv_thread.partition_shape_C((TILE, NUM_ROWS))) for _ in range(_HALF)]
    store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), Float16)
    store = cute.make_tiled_copy_C(store_atom, score_mma(NUM_ROWS, TILE)).get_slice(thread)
    to_shared = store.partition_D(probabilities)
    value_row = lane * ROW_BYTES + (warp_idx ^ (lane // 2 % 4)) * 16
    total = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    largest = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    scales = cute.make_rmem_tensor(cute.make_layout(2), Float32)
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
        for block in cutlass.range_constexpr(_HALF):
            sums[block].fill(0.0)
        cute.arch.mbarrier_wait(q_full, q_phase)
        q_phase ^= 1
        split_queries(NUM_ROWS, query_words, query_scales)
        for h in cutlass.range_constexpr(2):
            scales[h] = query_scales[row0 + 8 * h] * task.scale
        tile = begin
        left = kv_len - tile * TILE  # keys from this tile on
        if group == 0:
            _score(parts, num_slots, scores, later_scores, f_q, f_k, exchange, slot, phase)
        while tile < stop:
            slot1, ring_phase1 = _after(slot, phase, 1, num_slots)
            slot2, ring_phase2 = _after(slot, phase, 2, num_slots)
            if group == 0:
                cute.arch.mbarrier_wait(exchange.p_empty, phase0 ^ 1)
                _weigh(0, scores, weight_words, total, largest, exchange, scales, tile, row0, col0, kv_len, task)
                _hand_over(0, store, weights, to_shared, exchange)
                _add_values(0, 0, num_slots, sums, f_p, exchange, base, value_row, slot, phase, phase0, left, col0)
                if tile + 2 < stop:
                    _score(parts, num_slots, scores, later_scores, f_q, f_k, exchange, slot2, ring_phase2)
                if tile + 1 < stop:
                    _add_values(
                        *(0, 1, num_slots, sums, f_p, exchange, base, value_row),
                        *(slot1, ring_phase1, phase1, left - TILE, col0),
                    )
                    _take_factor(shared, 1, row0, largest, total)
            else:
                if tile + 1 < stop:
                    _score(parts, num_slots, scores, later_scores, f_q, f_k, exchange, slot1, ring_phase1)
                _add_values(1, 0, num_slots, sums, f_p, exchange, base, value_row, slot, phase, phase0, left, col0)
                _take_factor(shared, 0, row0, largest, total)
                if tile + 1 < stop:
                    cute.arch.mbarrier_wait(exchange.p_empty + 1, phase1 ^ 1)
                    _weigh(
                        1, scores, weight_words, total, largest, exchange, scales, tile + 1, row0, col0, kv_len, task
                    )
                    _hand_over(1, store, weights, to_shared, exchange)
                    _add_values(
                        *(1, 1, num_slots, sums, f_p, exchange, base, value_row),
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
            row = task.row_tile * NUM_ROWS + column
            inverse, score = normalise(totals[0, column] + totals[1, column], shared[0, 0, column] - _EXPONENT)
            if thread_of_cta < 132 and row < task.rows:
                if whole:
                    task.lse[seq * task.rows + row] = score
                else:
                    leave_score(task, where, column, score)
            for block in cutlass.range_constexpr(_HALF):
                for h in cutlass.range_constexpr(2):
                    v = cutlass.const_expr(c % 2 + 2 * h + c // 2 * 4)
                    sums[block][v] = sums[block][v] * inverse * task.value_scale
        write_columns(
            NUM_ROWS, task, sums, whole, seq, where, col0, _HALF * group * BLOCK + warp_idx * 16 + lane // 4 * 2
        )
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(task, duty, scratch)


@cute.jit
def _after(slot: Int32, phase: Int32, tiles: cutlass.Constexpr, num_slots: cutlass.Constexpr):
    """(slot, phase) of so many tiles later, at most once round."""
    later, later_phase = slot + tiles * SLOTS_OF_TILE, phase
    if later >= num_slots:
        later -= num_slots
        later_phase ^= 1
    return later, later_phase


@cute.jit
def _score(
    parts: cutlass.Constexpr,
    num_slots: cutlass.Constexpr,
    scores: cute.Tensor,
    later_scores: cute.Tensor,
    f_q: cute.Tensor,
    f_k: cute.Tensor,
    exchange: Exchange,
    slot: Int32,
    phase: Int32,
) -> None:
    """S = Q K^T of a tile. The first two slots' products go one after another, the last one's wait for their sum."""
    mma = score_mma(NUM_ROWS, TILE)
    for place in cutlass.range_constexpr(SLOTS_OF_TILE):
        at = wait_for(exchange.full, slot, phase, place, num_slots)
        multiply_slot(False, parts, mma, (scores, later_scores, later_scores)[place], f_k, f_q, at, place)
        if cutlass.const_expr(place > 0):
            warpgroup.wait_group(0)
            for v in cutlass.range_constexpr(TILE // 2):
                scores[v] = scores[v] + later_scores[v]


@cute.jit
def _weigh(
    stage: cutlass.Constexpr,
    scores: cute.Tensor,
    weight_words: cute.Tensor,
    total: cute.Tensor,
    largest: cute.Tensor,
    exchange: Exchange,
    scales: cute.Tensor,
    tile: Int32,
    row0: Int32,
    col0: Int32,
    kv_len: Int32,
    task: Task,
) -> None:
    """P of a tile as words of two float16, and what earlier sums are multiplied by."""
    _mask(scores, tile * TILE, row0, col0, kv_len, task)
    factor = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for h in cutlass.range_constexpr(2):
        known = largest[h]
        found = largest_of_row(scores, h) * scales[h]
        if found > known + _SLACK:
            largest[h] = found
        reference = finite(largest[h])
        factor[h] = exp2(known - reference)
        if col0 == 0:
            exchange.shared[stage, 0, row0 + 8 * h] = largest[h]
            exchange.shared[stage, 1, row0 + 8 * h] = factor[h]
        total[h] = total[h] * factor[h]
        for j in cutlass.range_constexpr(TILE // 8):
            v = cutlass.const_expr(2 * h + 4 * j)
            p, later_p = (exp2(scores[v + i] * scales[h] - (reference - _EXPONENT)) for i in range(2))
            total[h] += p + later_p
            weight_words[v // 2] = pack(p, later_p)  # at once, or each exponential is computed twice
    any_raised = cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0)
    exchange.raised[row0 // 16, stage] = Int32(any_raised)


@cute.jit
def _hand_over(
    stage: cutlass.Constexpr, store: cute.TiledCopy, weights: cute.Tensor, to_shared: cute.Tensor, exchange: Exchange
) -> None:
    """P to both warpgroups; all of this one have read the tile's keys."""
    cute.copy(store, store.retile(weights), to_shared[(None, None, None, stage)])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(exchange.p_full + stage)


@cute.jit
def _take_factor(
    shared: cute.Tensor, stage: cutlass.Constexpr, row0: Int32, largest: cute.Tensor, total: cute.Tensor
) -> None:
    for h in cutlass.range_constexpr(2):
        largest[h] = shared[stage, 0, row0 + 8 * h]
        total[h] = total[h] * shared[stage, 1, row0 + 8 * h]


@cute.jit
def _add_values(
    group: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    num_slots: cutlass.Constexpr,
    sums,
    f_p: cute.Tensor,
    exchange: Exchange,
    base: Int32,
    value_row: Int32,
    slot: Int32,
    phase: Int32,
    p_phase: Int32,
    left: Int32,  # keys from this tile on
    col0: Int32,
) -> None:
    """O^T += V^T P^T of a tile for the warpgroup's half of the dims, 32 tokens of two blocks a turn."""
    mma = narrow_mma(NUM_ROWS)
    widened = [cute.make_rmem_tensor(cute.make_layout(8 * STEPS), Float16) for _ in range(2)]
    words = [cute.recast_tensor(operand, Int32) for operand in widened]
    loaded = cute.make_rmem_tensor(cute.make_layout(8), Int32)
    operand_layout = cute.make_layout(((2, 2, 2), 1, STEPS), stride=((1, 2, 4), 0, 8))
    f_a = [cute.make_tensor(operand.iterator, operand_layout) for operand in widened]
    own = cutlass.const_expr((_HALF * group, _HALF * group + _HALF))
    last_turns = cutlass.const_expr((3, 3, -1) if group == 0 else (-1, 1, 3))  # of the values of each slot
    for place in cutlass.range_constexpr(SLOTS_OF_TILE):
        if cutlass.const_expr(last_turns[place] >= 0):
            wait_for(exchange.full, slot, phase, place, num_slots)
    cute.arch.mbarrier_wait(exchange.p_full + stage, p_phase)
    if left < TILE:  # all have read their keys
        clear_values(own, base, slot, num_slots, value_row, left)
    load_values(own[0], base, slot, num_slots, value_row, loaded)
    release(exchange.empty + wrapped(slot + last_turns.index(-1), num_slots))
    raised = exchange.raised
    if raised[0, stage] + raised[1, stage] + raised[2, stage] + raised[3, stage] > 0:
        for c in cutlass.range_constexpr(NUM_ROWS // 4):
            factor = exchange.shared[stage, 1, column_of(col0, c)]
            for block in cutlass.range_constexpr(_HALF):
                for h in cutlass.range_constexpr(2):
                    v = cutlass.const_expr(c % 2 + 2 * h + c // 2 * 4)
                    sums[block][v] = sums[block][v] * factor
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for turn in cutlass.range_constexpr(_HALF):
        if cutlass.const_expr(turn > 1):
            warpgroup.wait_group(1)
        widen_values(loaded, words[turn % 2])
        if cutlass.const_expr(turn + 1 < _HALF):
            load_values(own[0] + turn + 1, base, slot, num_slots, value_row, loaded)
        for place in cutlass.range_constexpr(SLOTS_OF_TILE):
            if cutlass.const_expr(last_turns[place] == turn):
                release(exchange.empty + wrapped(slot + place, num_slots))
        warpgroup.fence()
        for k in cutlass.range_constexpr(2):
            for idx in cutlass.range_constexpr(2):
                block = cutlass.const_expr(turn // 2 * 2 + idx)
                p_step = f_p[(None, None, turn % 2 * 2 + k, stage)]
                cute.gemm(mma, sums[block], f_a[turn % 2][(None, None, idx * 2 + k)], p_step, sums[block])
        warpgroup.commit_group()
    warpgroup.wait_group(0)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(exchange.p_empty + stage)


@cute.jit
def _mask(scores: cute.Tensor, token0: Int32, row0: Int32, col0: Int32, kv_len: Int32, task: Task) -> None:
    first_row = task.row_tile * NUM_ROWS
    if token0 + TILE > keys_seen(kv_len, first_row, task.rows, task.heads):
        for v in cutlass.range_constexpr(TILE // 2):
            row = first_row + row0 + v // 2 % 2 * 8
            if token0 + col0 + v % 2 + v // 4 * 8 >= keys_seen(kv_len, row, task.rows, task.heads):
                scores[v] = Float32(NOTHING)
