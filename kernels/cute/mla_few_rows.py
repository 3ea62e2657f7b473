"""Latent decode of up to 32 query rows by two warpgroups that take alternate tiles.

The products are transposed: S^T = K Q^T has the 64 tokens of a tile in the rows of the matrix instruction and the query
rows in its columns, as few as 8, and O^T = V^T P^T reads the same tile as a transposed operand. Each warpgroup keeps
maxima, sums and all 512 dims of its own; the two become one when their part of a sequence ends.

A thread holds the instruction's rows row0 and row0 + 8 and its columns col0 + i + 8 j; value v = i + 2 h + 4 j of a
fragment stands in row row0 + 8 h and column col0 + i + 8 j. "Column c" below counts the thread's own: c = i + 2 j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.mla_merge import merge_parts
from dist_infer.kernels.cute.mla_parts import leave_fragments, quad_of
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, keys_seen, normalise
from dist_infer.kernels.cute.mla_tiles import (
    BLOCK,
    NUM_LATENT_BLOCKS,
    TILE,
    WIDTH,
    Task,
    clear_latents,
    part_slot,
    tiles_of,
    wrapped,
)

SLOT_BLOCKS = 3  # a slot of the ring holds 192 columns of a tile
SLOT_COLUMNS = SLOT_BLOCKS * BLOCK
SLOTS_OF_TILE = WIDTH // SLOT_COLUMNS
NUM_SLOTS = 2 * SLOTS_OF_TILE  # each is always of the same warpgroup, see attend_few_rows
_PAIR_BARRIER = 3
_HALF = NUM_LATENT_BLOCKS // 2


def blocks_at_once(rows):
    """That a warpgroup gives the other when they become one: as shared memory has room for."""
    return _HALF if rows <= 16 else _HALF // 2


def score_mma(dtype, rows):
    """S^T = K Q^T."""
    return _make_mma(dtype, rows, OperandMajorMode.K)


def value_mma(dtype, rows):
    """O^T = V^T P^T, 64 dims at a time."""
    return _make_mma(dtype, rows, OperandMajorMode.MN)


def _make_mma(dtype, rows, a_major):
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (TILE, rows, 16), warpgroup.OperandSource.SMEM, a_major, OperandMajorMode.K
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def attend_few_rows(
    num_rows: cutlass.Constexpr,
    num_slots: cutlass.Constexpr,
    keys: cute.Tensor,  # [token, column, slot]
    values: cute.Tensor,  # the same memory as [dim, token, block]
    queries: cute.Tensor,  # [row, column]
    probabilities: cute.Tensor,  # [row, token, warpgroup]
    maxima: cute.Tensor,  # [warpgroup, parity, warp, row]
    stats: cute.Tensor,  # [sum of each warp and then both warpgroups' maxima, row]
    exchange: cute.Tensor,  # [4 values, thread, quad, warpgroup]
    full: cute.Pointer,
    empty: cute.Pointer,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    duty: cute.Tensor,
    scratch: cute.Tensor,  # for the merge, on the queries' memory
    task: Task,
) -> None:
    """What the consumer warpgroups do with a worker's tiles.

    A warpgroup waits for slots of its own tiles alone, by the parity of a phase. Were a slot to change hands, a
    warpgroup could wait for it while what the other has of it is still on its way, and take that phase for its own.
    """
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta % 128
    group = cute.arch.make_warp_uniform(thread_of_cta // 128 - 1)
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    row0, col0 = warp * 16 + lane // 4, lane % 4 * 2
    num_columns = cutlass.const_expr(num_rows // 4)
    qk, pv = score_mma(keys.element_type, num_rows), value_mma(keys.element_type, num_rows)
    qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
    f_k = qk_thread.make_fragment_A(qk_thread.partition_A(keys))
    f_q = qk_thread.make_fragment_B(qk_thread.partition_B(queries))
    f_v = pv_thread.make_fragment_A(pv_thread.partition_A(values))
    f_p = pv_thread.make_fragment_B(pv_thread.partition_B(probabilities))[(None, None, None, group)]
    scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((TILE, num_rows)))
    sums = [pv_thread.make_fragment_C(pv_thread.partition_shape_C((TILE, num_rows))) for _ in range(NUM_LATENT_BLOCKS)]
    halves = [pv_thread.make_fragment_C(pv_thread.partition_shape_C((TILE, num_rows))) for _ in range(_HALF)]
    maximum = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    total = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    factor = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
    other_factor = cute.make_rmem_tensor(cute.make_layout(num_columns), Float32)
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
        tile = begin
        while tile < stop:
            if counter % 2 == group:
                token0 = tile * TILE
                # S^T = K Q^T
                warpgroup.fence()
                at, at_phase = slot, phase
                for part in cutlass.range_constexpr(SLOTS_OF_TILE):
                    cute.arch.mbarrier_wait(full + at, at_phase)
                    for k in cutlass.range_constexpr(SLOT_COLUMNS // 16):
                        qk.set(warpgroup.Field.ACCUMULATE, part + k > 0)
                        q_step = f_q[(None, None, part * (SLOT_COLUMNS // 16) + k)]
                        cute.gemm(qk, scores, f_k[(None, None, k, at)], q_step, scores)
                    at += 1
                    if at == num_slots:
                        at = Int32(0)
                        at_phase ^= 1
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                mask(num_rows, scores, token0, row0, col0, kv_len, task)
                # P^T
                for c in cutlass.range_constexpr(num_columns):
                    largest = largest_of_warp(scores, c) * task.scale
                    if lane < 4:
                        maxima[group, parity, warp, column_of(col0, c)] = largest
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
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
                        p = exp2(scores[c % 2 + 2 * h + c // 2 * 4] * task.scale - reference)
                        total[c] += p
                        probabilities[column, row0 + 8 * h, group] = p.to(keys.element_type)
                parity ^= 1
                if token0 + TILE > kv_len:
                    clear_latents(keys, kv_len - token0, slot, num_slots, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                _multiply(num_rows, sums, factor)
                # O^T += V^T P^T
                warpgroup.fence()
                pv.set(warpgroup.Field.ACCUMULATE, True)
                for block in cutlass.range_constexpr(NUM_LATENT_BLOCKS):
                    where = wrapped(slot + block // SLOT_BLOCKS, num_slots) * SLOT_BLOCKS + block % SLOT_BLOCKS
                    for k in cutlass.range_constexpr(TILE // 16):
                        cute.gemm(pv, sums[block], f_v[(None, None, k, where)], f_p[(None, None, k)], sums[block])
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                for part in cutlass.range_constexpr(SLOTS_OF_TILE):
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + wrapped(slot + part, num_slots))
            counter += 1
            slot += SLOTS_OF_TILE
            if slot >= num_slots:
                slot -= num_slots
                phase ^= 1
            tile += 1
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        # the two warpgroups become one
        if first != task.first:
            cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)  # the other has taken what was given
        for c in cutlass.range_constexpr(num_columns):
            summed = total[c]
            for step in cutlass.range_constexpr(3):
                summed += cute.arch.shuffle_sync_bfly(summed, 4 << step)
            if lane < 4:
                stats[4 * group + warp, column_of(col0, c)] = summed
                if warp == 0:
                    stats[8 + group, column_of(col0, c)] = maximum[c]
        _give(num_rows, sums, 0, exchange, group, thread)
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        whole = begin == 0 and stop == tiles
        starts = Int32(0)
        if begin == 0:
            starts = Int32(1)
        where = part_slot(task.worker, task.row_tiles, task.row_tile, starts)
        for c in cutlass.range_constexpr(num_columns):
            of_row = stats[None, column_of(col0, c)].load()
            both = cute.arch.fmax(of_row[8], of_row[9])
            reference = finite(both)
            first_weight, second_weight = exp2(of_row[8] - reference), exp2(of_row[9] - reference)
            summed = (of_row[0] + of_row[1] + of_row[2] + of_row[3]) * first_weight
            summed += (of_row[4] + of_row[5] + of_row[6] + of_row[7]) * second_weight
            inverse, scores_of_rows[c] = normalise(summed, both)
            factor[c], other_factor[c] = first_weight * inverse, second_weight * inverse
            if group == 1:
                factor[c], other_factor[c] = second_weight * inverse, first_weight * inverse
        for turn in cutlass.range_constexpr(0, _HALF, blocks_at_once(num_rows)):
            if cutlass.const_expr(turn > 0):
                cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
                _give(num_rows, sums, turn, exchange, group, thread)
                cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
            _take(num_rows, sums, turn, halves, factor, other_factor, exchange, group, thread)
        if whole:
            _write(num_rows, task, halves, scores_of_rows, seq, col0, _HALF * group * BLOCK + row0)
        else:
            first_unit = (_HALF * group * 4 + warp) * (num_rows // 8)
            leave_fragments(num_rows, task, halves, scores_of_rows, where, first_unit, lane)
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(False, task, duty, scratch)


@cute.jit
def mask(
    num_rows: cutlass.Constexpr, scores: cute.Tensor, token0: Int32, row0: Int32, col0: Int32, kv_len: Int32, task: Task
) -> None:
    """Scores of keys that a query must not see become -inf."""
    first_row = task.row_tile * num_rows
    if token0 + TILE > keys_seen(kv_len, first_row, task.rows, task.heads):
        for v in cutlass.range_constexpr(num_rows // 2):
            token = token0 + row0 + v // 2 % 2 * 8
            row = first_row + col0 + v % 2 + v // 4 * 8
            if token >= keys_seen(kv_len, row, task.rows, task.heads):
                scores[v] = Float32(NOTHING)


@cute.jit
def largest_of_warp(scores: cute.Tensor, c: cutlass.Constexpr) -> Float32:
    """The maximum of the thread's column c over the 16 tokens of its warp."""
    v = cutlass.const_expr(c % 2 + c // 2 * 4)
    largest = cute.arch.fmax(scores[v], scores[v + 2])
    for step in cutlass.range_constexpr(3):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 4 << step))
    return largest


@cute.jit
def _multiply(num_rows: cutlass.Constexpr, sums, factor: cute.Tensor) -> None:
    for block in cutlass.range_constexpr(NUM_LATENT_BLOCKS):
        for v in cutlass.range_constexpr(num_rows // 2):
            sums[block][v] = sums[block][v] * factor[v % 2 + v // 4 * 2]


@cute.jit
def _give(
    num_rows: cutlass.Constexpr, sums, turn: cutlass.Constexpr, exchange: cute.Tensor, group: Int32, thread: Int32
) -> None:
    """Blocks of the other warpgroup's half, in quads: 4 j .. 4 j + 3 of a fragment."""
    for idx in cutlass.range_constexpr(blocks_at_once(num_rows)):
        for j in cutlass.range_constexpr(num_rows // 8):
            quad = idx * (num_rows // 8) + j
            if group == 0:
                exchange[None, thread, quad, 0].store(quad_of(sums[_HALF + turn + idx], num_rows, j).load())
            else:
                exchange[None, thread, quad, 1].store(quad_of(sums[turn + idx], num_rows, j).load())


@cute.jit
def _take(
    num_rows: cutlass.Constexpr,
    sums,
    turn: cutlass.Constexpr,
    halves,
    factor: cute.Tensor,
    other_factor: cute.Tensor,
    exchange: cute.Tensor,
    group: Int32,
    thread: Int32,
) -> None:
    """What this warpgroup has kept and what the other has given become one."""
    for idx in cutlass.range_constexpr(blocks_at_once(num_rows)):
        for j in cutlass.range_constexpr(num_rows // 8):
            given = exchange[None, thread, idx * (num_rows // 8) + j, 1 - group].load()
            for i in cutlass.range_constexpr(4):
                v, c = cutlass.const_expr(4 * j + i), cutlass.const_expr(2 * j + i % 2)
                kept = sums[_HALF + turn + idx][v]
                if group == 0:
                    kept = sums[turn + idx][v]
                halves[turn + idx][v] = kept * factor[c] + given[i] * other_factor[c]


@cute.jit
def _write(
    num_rows: cutlass.Constexpr, task: Task, halves, scores: cute.Tensor, seq: Int32, col0: Int32, dim0: Int32
) -> None:
    """A thread's values and logarithms, to the call's output."""
    for c in cutlass.range_constexpr(num_rows // 4):
        row = task.row_tile * num_rows + column_of(col0, c)
        if row < task.rows:
            to = task.out[seq * task.rows + row, None]
            for block in cutlass.range_constexpr(_HALF):
                for h in cutlass.range_constexpr(2):
                    value = halves[block][c % 2 + 2 * h + c // 2 * 4]
                    to[dim0 + (block * BLOCK + 8 * h)] = value.to(task.out.element_type)
            if dim0 == 0:
                task.lse[seq * task.rows + row] = scores[c]


def column_of(col0, c):
    """The query row of a thread's column c."""
    return col0 + c % 2 + c // 2 * 8
