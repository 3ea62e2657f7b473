"""Latent decode of up to 32 query rows over a cache of E4M3, which the matrix units get from registers.

As in mla_few_rows the products are transposed and two warpgroups take alternate tiles. Here a tile stays in shared
memory as bytes: for each product a warp loads the bytes of its own rows (tokens for S^T = K Q^T, dims for
O^T = V^T P^T), widens them to float16, which holds every E4M3, and gives them as the left operand. Two sets of
registers alternate, so that one is filled while the other is read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.mla_few_rows import column_of, largest_of_warp, mask
from dist_infer.kernels.cute.mla_merge import leave_score, merge_parts, rows_of_part
from dist_infer.kernels.cute.mla_operands import (
    BLOCK_BYTES,
    ROW_BYTES,
    SLOT_BLOCKS,
    SLOT_BYTES,
    SLOTS_OF_TILE,
    STEPS,
    WEIGHT_BYTES,
    WEIGHT_EXPONENT,
    load_keys,
    load_values,
    store_weights,
    widen_keys,
    widen_queries,
    widen_values,
)
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, normalise
from dist_infer.kernels.cute.mla_tiles import (
    BLOCK,
    NUM_BLOCKS,
    NUM_LATENT_BLOCKS,
    TILE,
    Task,
    part_slot,
    tiles_of,
    wrapped,
)

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
    pair: cutlass.Constexpr,
    num_rows: cutlass.Constexpr,
    num_slots: cutlass.Constexpr,
    ring: cute.Pointer,  # slots of three blocks of [token, 64 bytes], swizzled by 64 bytes
    queries: cute.Tensor,  # [row, column] in float16
    query_words: cute.Tensor,  # the same memory, [word]
    query_sizes: cute.Tensor,  # [warp]
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
    first_row = task.row_tile * num_rows
    mma = narrow_mma(num_rows)
    mma_thread = mma.get_slice(thread)
    f_q = mma_thread.make_fragment_B(mma_thread.partition_B(queries))
    f_p = mma_thread.make_fragment_B(mma_thread.partition_B(probabilities))[(None, None, None, group)]
    chains = [mma_thread.make_fragment_C(mma_thread.partition_shape_C((TILE, num_rows))) for _ in range(2)]
    scores = chains[0]
    shape = mma_thread.partition_shape_C((TILE, num_rows))
    sums = [mma_thread.make_fragment_C(shape) for _ in range(NUM_LATENT_BLOCKS)]
    halves = [mma_thread.make_fragment_C(mma_thread.partition_shape_C((TILE, num_rows))) for _ in range(_HALF)]
    widened = [cute.make_rmem_tensor(cute.make_layout(8 * STEPS), Float16) for _ in range(2)]
    words = [cute.recast_tensor(operand, Int32) for operand in widened]
    loaded = [cute.make_rmem_tensor(cute.make_layout(8), Int32) for _ in range(2)]
    operand_layout = cute.make_layout(((2, 2, 2), 1, STEPS), stride=((1, 2, 4), 0, 8))
    f_a = [cute.make_tensor(operand.iterator, operand_layout) for operand in widened]
    # where a lane's rows of 16 bytes begin in a block
    token = warp * 16 + lane % 16
    key_row = token * ROW_BYTES + ((lane // 16) ^ (token // 2 % 4)) * 16
    value_row = lane * ROW_BYTES + (warp ^ (lane // 2 % 4)) * 16
    base = ring.toint()
    # where it stores its row of 8 tokens: of query row lane % 8 and later ones
    weight_row = weights_memory.toint() + (group * num_rows + lane // 16 * 8 + lane % 8) * WEIGHT_BYTES
    weight_row += ((warp * 2 + lane // 8 % 2) ^ (lane % 8)) * 16
    maximum = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    total = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    factor = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
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
        scale = widen_queries(num_rows, query_words, query_sizes, task) * task.scale
        tile = begin
        while tile < stop:
            if counter % 2 == group:
                token0 = tile * TILE
                # S^T = K Q^T
                for block in cutlass.range_constexpr(NUM_BLOCKS + 1):
                    if cutlass.const_expr(block < NUM_BLOCKS):
                        at = wrapped(slot + block // SLOT_BLOCKS, num_slots)
                        if cutlass.const_expr(block % SLOT_BLOCKS == 0):
                            at_phase = phase
                            if slot + block // SLOT_BLOCKS >= num_slots:
                                at_phase = phase ^ 1
                            cute.arch.mbarrier_wait(full + at, at_phase)
                        place = base + at * SLOT_BYTES + block % SLOT_BLOCKS * BLOCK_BYTES
                        load_keys(place, key_row, loaded[block % 2])
                    if cutlass.const_expr(block > 0):
                        done = cutlass.const_expr(block - 1)
                        widen_keys(loaded[done % 2], words[done % 2])
                        warpgroup.fence()
                        for k in cutlass.range_constexpr(STEPS):
                            mma.set(warpgroup.Field.ACCUMULATE, done * STEPS + k > 1)
                            q_step = f_q[(None, None, done * STEPS + k)]
                            cute.gemm(mma, chains[k % 2], f_a[done % 2][(None, None, k)], q_step, chains[k % 2])
                        warpgroup.commit_group()
                        warpgroup.wait_group(1 if block < NUM_BLOCKS else 0)
                for v in cutlass.range_constexpr(num_rows // 2):
                    scores[v] = scores[v] + chains[1][v]
                if token0 + TILE > kv_len:
                    _clear_latents(ring, kv_len - token0, slot, num_slots, thread)
                mask(num_rows, scores, token0, row0, col0, kv_len, task)
                # P^T
                for c in cutlass.range_constexpr(num_columns):
                    largest = largest_of_warp(scores, c) * scale
                    if lane < 4:
                        maxima[group, parity, warp, column_of(col0, c)] = largest
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                load_values(0, base, slot, num_slots, value_row, loaded[0])
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
                        scores[v] = exp2(scores[v] * scale - (reference - WEIGHT_EXPONENT))
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
                    later = cutlass.const_expr(turn + 1)
                    if cutlass.const_expr(later < NUM_LATENT_BLOCKS):
                        load_values(later, base, slot, num_slots, value_row, loaded[later % 2])
                    if cutlass.const_expr(turn > 0):
                        widen_values(loaded[turn % 2], words[turn % 2])
                    if cutlass.const_expr(turn in _LAST_TURNS):
                        _release(pair, empty + wrapped(slot + _LAST_TURNS.index(turn), num_slots))
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(2):
                        for idx in cutlass.range_constexpr(2):
                            block = cutlass.const_expr(turn // 2 * 2 + idx)
                            p_step = f_p[(None, None, turn % 2 * 2 + k)]
                            cute.gemm(mma, sums[block], f_a[turn % 2][(None, None, idx * 2 + k)], p_step, sums[block])
                    warpgroup.commit_group()
                    warpgroup.wait_group(1 if later < NUM_LATENT_BLOCKS else 0)
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
            inverse, score = normalise(summed, both - WEIGHT_EXPONENT)
            factor[c] = exp2(maximum[c] - reference) * inverse * task.value_scale
            if thread_of_cta < 132 and group == 0 and first_row + column < task.rows:
                if whole:
                    task.lse[seq * task.rows + first_row + column] = score
                else:
                    leave_score(task, where, column, score)
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
        _write(num_rows, task, halves, whole, seq, where, col0, _HALF * group * BLOCK + warp * 16 + lane // 4 * 2)
        cute.arch.fence_proxy("async.shared", space="cta")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(task, duty, scratch)


@cute.jit
def _release(pair: cutlass.Constexpr, barrier: cute.Pointer) -> None:
    """A warp is done with a slot; in a pair both CTAs load into both."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if cutlass.const_expr(pair):
            for rank in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive(barrier, rank)
        else:
            cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _clear_latents(ring: cute.Pointer, token: Int32, slot: Int32, num_slots: cutlass.Constexpr, thread: Int32) -> None:
    """A warpgroup writes zeros from `token` of a tile on: there may be NaN, which a weight of 0 does not cancel.

    Others may still read keys there: they don't count.
    """
    words = cute.make_tensor(cute.recast_ptr(ring, dtype=Int32), cute.make_layout(num_slots * (SLOT_BYTES // 4)))
    row = cutlass.max(token, Int32(0))
    block = thread // 16
    at = wrapped(slot + block // SLOT_BLOCKS, num_slots) * (SLOT_BYTES // 4)
    at += block % SLOT_BLOCKS * (BLOCK_BYTES // 4) + thread % 16
    while row < TILE:
        words[at + row * (ROW_BYTES // 4)] = Int32(0)
        row += 1
    cute.arch.fence_proxy("async.shared", space="cta")


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
def _write(
    num_rows: cutlass.Constexpr,
    task: Task,
    halves,
    whole: cutlass.Boolean,
    seq: Int32,
    slot: Int32,
    col0: Int32,
    dim0: Int32,
) -> None:
    """A thread's values, to the call's output or to a part."""
    values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for c in cutlass.range_constexpr(num_rows // 4):
        row = task.row_tile * num_rows + column_of(col0, c)
        if whole:
            if row < task.rows:
                twos = cute.local_tile(task.out[seq * task.rows + row, None], (2,), (None,))
                for turn in cutlass.range_constexpr(_HALF):
                    for h in cutlass.range_constexpr(2):
                        values[h] = halves[turn][c % 2 + 2 * h + c // 2 * 4]
                    twos[None, dim0 // 2 + turn * (BLOCK // 2)].store(values.load().to(task.out.element_type))
        elif row < task.rows:
            twos = cute.local_tile(rows_of_part(task, slot)[column_of(col0, c), None], (2,), (None,))
            for turn in cutlass.range_constexpr(_HALF):
                for h in cutlass.range_constexpr(2):
                    values[h] = halves[turn][c % 2 + 2 * h + c // 2 * 4]
                twos[None, dim0 // 2 + turn * (BLOCK // 2)].store(values.load())
