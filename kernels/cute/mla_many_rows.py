"""Latent decode of 64 query rows by two warpgroups that share two tiles at a time.

Of a pair of tiles the first is warpgroup 0's, the second warpgroup 1's: it scores the tile, makes the weights P in
registers and leaves them for the other one where the tile's rotated keys were. Both add P V of both tiles to the half
of the dims that they hold. The running maxima pass from one tile to the next, so that both halves have one scale. While
one warpgroup makes weights, the other one keeps the matrix units busy; warpgroup 1 does so even for itself.

Columns of a stage are freed by halves, as soon as their last product is done. Two CTAs with the row tiles of one
sequence may form a pair: each loads one half of the blocks into both.

A thread holds rows row0 and row0 + 8; value v = i + 2 h + 4 j of a fragment stands in row row0 + 8 h and column
col0 + i + 8 j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from dist_infer.kernels.cute.mla_merge import hand_in, merge_parts
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, keys_seen, normalise
from dist_infer.kernels.cute.mla_tiles import (
    BLOCK,
    BLOCK_BYTES,
    LATENT,
    NUM_BLOCKS,
    NUM_LATENT_BLOCKS,
    TILE,
    Task,
    clear_latents,
    part_slot,
    tiles_of,
)

NUM_ROWS = 64
NUM_STAGES = 2
_BLOCK_SIZE = BLOCK * TILE
_PAIR_BARRIER = 3
_HALF = NUM_LATENT_BLOCKS // 2
_HALF_DIMS = LATENT // 2


def score_mma(dtype):
    """S = Q K^T."""
    op = warpgroup.MmaF16BF16Op(
        dtype,
        Float32,
        (NUM_ROWS, TILE, 16),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def value_mma(dtype, source):
    """O = P V for half of the dims."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (NUM_ROWS, _HALF_DIMS, 16), source, OperandMajorMode.K, OperandMajorMode.MN
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def block_order(stage):
    """The blocks of a stage in the order in which they become free, are loaded and scored; the rotated keys last."""
    near = range(_HALF * stage, _HALF * stage + _HALF)
    far = range(_HALF * (1 - stage), _HALF * (1 - stage) + _HALF)
    return *near, *far, NUM_LATENT_BLOCKS


def group_of(stage, place):
    """The group of a place of `block_order`: the stage's warpgroup frees the first half, the other one the rest."""
    return 2 * stage + (place >= _HALF)


@cute.jit
def attend_many_rows(
    pair: cutlass.Constexpr,
    keys: cute.Tensor,  # [token, column, stage * 9 + block]
    queries: cute.Tensor,  # [row, column]
    shared: cute.Tensor,  # [warpgroup, (running maximum, factor), row] of its last tile
    totals: cute.Tensor,  # [warpgroup, row], on the queries' memory
    full: cute.Pointer,
    empty: cute.Pointer,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    p_full: cute.Pointer,
    duty: cute.Tensor,
    scratch: cute.Tensor,  # for the merge, on the queries' memory
    task: Task,
) -> None:
    """What the consumer warpgroups do with a worker's tiles."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta % 128
    group = cute.arch.make_warp_uniform(thread_of_cta // 128 - 1)
    lane = thread % 32
    row0, col0 = thread // 32 * 16 + lane // 4, lane % 4 * 2
    dtype = keys.element_type
    pv_own = value_mma(dtype, warpgroup.OperandSource.RMEM)
    pv_other = value_mma(dtype, warpgroup.OperandSource.SMEM)
    qk_thread = score_mma(dtype).get_slice(thread)
    own_thread, other_thread = pv_own.get_slice(thread), pv_other.get_slice(thread)
    probabilities = _weights_memory(keys)
    f_q = qk_thread.make_fragment_A(qk_thread.partition_A(queries))
    f_k = qk_thread.make_fragment_B(qk_thread.partition_B(keys))
    f_v = own_thread.make_fragment_B(own_thread.partition_B(_halves(keys)))[(None, None, None, group, None)]
    f_p = other_thread.make_fragment_A(other_thread.partition_A(probabilities))
    scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((NUM_ROWS, TILE)))
    sums = own_thread.make_fragment_C(own_thread.partition_shape_C((NUM_ROWS, _HALF_DIMS)))
    weights = cute.make_rmem_tensor(scores.layout, dtype)
    # the accumulator's values of 16 tokens are the operand's values of one step
    operand_layout = cute.make_layout(((2, 2, 2), 1, TILE // 16), stride=((1, 2, 4), 0, 8))
    f_w = cute.make_tensor(weights.iterator, operand_layout)
    store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    store = cute.make_tiled_copy_C(store_atom, score_mma(dtype)).get_slice(thread)
    to_shared = store.partition_D(probabilities)
    total = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    factor = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    largest = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    phase0, phase1, q_phase = Int32(0), Int32(0), Int32(0)
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        tiles = tiles_of(task.kv_lens, seq)
        begin = first - before
        stop = cutlass.min(task.end - before, tiles)
        kv_len = task.kv_lens[seq]
        total.fill(0.0)
        sums.fill(0.0)
        largest.fill(NOTHING)
        cute.arch.mbarrier_wait(q_full, q_phase)
        q_phase ^= 1
        tile = begin
        if group == 0:
            while tile < stop:
                _score(dtype, 0, scores, f_q, f_k, full, phase0)
                _weigh(scores, weights, total, largest, factor, shared, 0, tile, row0, col0, kv_len, task)
                _hand_over(keys, store, weights, to_shared, p_full, 0, tile, kv_len, thread)
                _multiply(sums, factor)
                warpgroup.fence()
                pv_own.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(TILE // 16):
                    cute.gemm(pv_own, sums, f_w[(None, None, k)], f_v[(None, None, k, 0)], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                _release(pair, empty + group_of(0, 0))
                if tile + 1 < stop:
                    _wait_for_half(full, 1, 0, phase1)
                    cute.arch.mbarrier_wait(p_full + 1, phase1)
                    _take_factor(shared, 1, row0, factor, largest, total)
                    _multiply(sums, factor)
                    warpgroup.fence()
                    pv_other.set(warpgroup.Field.ACCUMULATE, True)
                    for k in cutlass.range_constexpr(TILE // 16):
                        cute.gemm(pv_other, sums, f_p[(None, None, k, 1)], f_v[(None, None, k, 1)], sums)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    _release(pair, empty + group_of(1, _HALF))
                    phase1 ^= 1
                phase0 ^= 1
                tile += 2
        else:
            while tile < stop:
                if tile + 1 < stop:
                    _score(dtype, 1, scores, f_q, f_k, full, phase1)
                    _wait_for_half(full, 0, 1, phase0)
                    cute.arch.mbarrier_wait(p_full, phase0)
                    _take_factor(shared, 0, row0, factor, largest, total)
                    _multiply(sums, factor)
                    warpgroup.fence()
                    pv_other.set(warpgroup.Field.ACCUMULATE, True)
                    for k in cutlass.range_constexpr(TILE // 16):
                        cute.gemm(pv_other, sums, f_p[(None, None, k, 0)], f_v[(None, None, k, 0)], sums)
                    warpgroup.commit_group()
                    # beside those products
                    _weigh(scores, weights, total, largest, factor, shared, 1, tile + 1, row0, col0, kv_len, task)
                    _hand_over(keys, store, weights, to_shared, p_full, 1, tile + 1, kv_len, thread)
                    warpgroup.wait_group(0)
                    _release(pair, empty + group_of(0, _HALF))
                    _multiply(sums, factor)
                    warpgroup.fence()
                    pv_own.set(warpgroup.Field.ACCUMULATE, True)
                    for k in cutlass.range_constexpr(TILE // 16):
                        cute.gemm(pv_own, sums, f_w[(None, None, k)], f_v[(None, None, k, 1)], sums)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    _release(pair, empty + group_of(1, 0))
                    phase1 ^= 1
                else:
                    _wait_for_half(full, 0, 1, phase0)
                    cute.arch.mbarrier_wait(p_full, phase0)
                    _take_factor(shared, 0, row0, factor, largest, total)
                    _multiply(sums, factor)
                    warpgroup.fence()
                    pv_other.set(warpgroup.Field.ACCUMULATE, True)
                    for k in cutlass.range_constexpr(TILE // 16):
                        cute.gemm(pv_other, sums, f_p[(None, None, k, 0)], f_v[(None, None, k, 0)], sums)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    _release(pair, empty + group_of(0, _HALF))
                phase0 ^= 1
                tile += 2
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)  # the queries' memory is free
        for h in cutlass.range_constexpr(2):
            summed = total[h]
            for step in cutlass.range_constexpr(2):
                summed += cute.arch.shuffle_sync_bfly(summed, 1 << step)
            if lane % 4 == 0:
                totals[group, row0 + 8 * h] = summed
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        whole = begin == 0 and stop == tiles
        starts = Int32(0)
        if begin == 0:
            starts = Int32(1)
        where = part_slot(task.worker, task.row_tiles, task.row_tile, starts)
        for h in cutlass.range_constexpr(2):
            column = row0 + 8 * h
            row = task.row_tile * NUM_ROWS + column
            inverse, score = normalise(totals[0, column] + totals[1, column], largest[h])
            if group == 0 and col0 == 0 and row < task.rows:
                if whole:
                    task.lse[seq * task.rows + row] = score
                else:
                    task.part_lse[where, column] = score
            first_two = _HALF_DIMS // 2 * group + lane % 4
            if whole:
                if row < task.rows:
                    twos = cute.local_tile(task.out[seq * task.rows + row, None], (2,), (None,))
                    for j in cutlass.range_constexpr(_HALF_DIMS // 8):
                        for i in cutlass.range_constexpr(2):
                            values[i] = sums[i + 2 * h + 4 * j] * inverse
                        twos[None, first_two + 4 * j].store(values.load().to(dtype))
            else:
                twos = cute.local_tile(task.part_out[where, column, None], (2,), (None,))
                for j in cutlass.range_constexpr(_HALF_DIMS // 8):
                    for i in cutlass.range_constexpr(2):
                        values[i] = sums[i + 2 * h + 4 * j] * inverse
                    twos[None, first_two + 4 * j].store(values.load())
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        if not whole:
            hand_in(stop == tiles)
        first = before + stop
        before += tiles
        seq += 1
    merge_parts(task, duty, scratch)


@cute.jit
def _halves(keys: cute.Tensor) -> cute.Tensor:
    """The latents of the stages as [dim of a half, token, half, stage]."""
    kind = warpgroup.SmemLayoutAtomKind.MN_SW128
    atom = warpgroup.make_smem_layout_atom(kind, keys.element_type)
    half = cute.tile_to_shape(atom, (_HALF_DIMS, TILE), order=(1, 0))
    halves = cute.append(half.outer, cute.make_layout(2, stride=_HALF * _BLOCK_SIZE))
    stages = cute.append(halves, cute.make_layout(NUM_STAGES, stride=NUM_BLOCKS * _BLOCK_SIZE))
    return cute.make_tensor(cute.recast_ptr(keys.iterator, half.inner), stages)


@cute.jit
def _weights_memory(keys: cute.Tensor) -> cute.Tensor:
    """The rotated keys' block of each stage as [row, token, stage]."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, keys.element_type)
    block = cute.tile_to_shape(atom, (NUM_ROWS, TILE), order=(0, 1))
    stages = cute.append(block.outer, cute.make_layout(NUM_STAGES, stride=NUM_BLOCKS * _BLOCK_SIZE))
    return cute.make_tensor(cute.recast_ptr(keys.iterator + NUM_LATENT_BLOCKS * _BLOCK_SIZE, block.inner), stages)


@cute.jit
def _score(
    dtype: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    scores: cute.Tensor,
    f_q: cute.Tensor,
    f_k: cute.Tensor,
    full: cute.Pointer,
    phase: Int32,
) -> None:
    """S = Q K^T of the tile of a stage, block by block as they arrive. A barrier is set for the next tile at once."""
    qk = score_mma(dtype)
    warpgroup.fence()
    for place in cutlass.range_constexpr(NUM_BLOCKS):
        block = cutlass.const_expr(block_order(stage)[place])
        cute.arch.mbarrier_wait(full + (stage * NUM_BLOCKS + block), phase)
        for k in cutlass.range_constexpr(BLOCK // 16):
            qk.set(warpgroup.Field.ACCUMULATE, place + k > 0)
            q_step = f_q[(None, None, block * (BLOCK // 16) + k)]
            cute.gemm(qk, scores, q_step, f_k[(None, None, k, stage * NUM_BLOCKS + block)], scores)
    warpgroup.commit_group()
    thread, _, _ = cute.arch.thread_idx()
    place = thread % 128
    if place < NUM_BLOCKS:
        cute.arch.mbarrier_arrive_and_expect_tx(full + (stage * NUM_BLOCKS + place), BLOCK_BYTES)
    warpgroup.wait_group(0)


@cute.jit
def _weigh(
    scores: cute.Tensor,
    weights: cute.Tensor,
    total: cute.Tensor,
    largest: cute.Tensor,
    factor: cute.Tensor,
    shared: cute.Tensor,
    stage: cutlass.Constexpr,
    tile: Int32,
    row0: Int32,
    col0: Int32,
    kv_len: Int32,
    task: Task,
) -> None:
    """P of a tile in registers, and what earlier sums are multiplied by."""
    _mask(scores, tile * TILE, row0, col0, kv_len, task)
    for h in cutlass.range_constexpr(2):
        known = largest[h]
        largest[h] = cute.arch.fmax(known, _largest_of_row(scores, h) * task.scale)
        reference = finite(largest[h])
        factor[h] = exp2(known - reference)
        if col0 == 0:
            shared[stage, 0, row0 + 8 * h] = largest[h]
            shared[stage, 1, row0 + 8 * h] = factor[h]
        total[h] = total[h] * factor[h]
        for j in cutlass.range_constexpr(TILE // 8):
            for i in cutlass.range_constexpr(2):
                p = exp2(scores[i + 2 * h + 4 * j] * task.scale - reference)
                total[h] += p
                weights[i + 2 * h + 4 * j] = p.to(weights.element_type)


@cute.jit
def _hand_over(
    keys: cute.Tensor,
    store: cute.TiledCopy,
    weights: cute.Tensor,
    to_shared: cute.Tensor,
    p_full: cute.Pointer,
    stage: cutlass.Constexpr,
    tile: Int32,
    kv_len: Int32,
    thread: Int32,
) -> None:
    """P to the other warpgroup, in the place of the rotated keys, which all warps of this one have read by then."""
    last = tile * TILE + TILE > kv_len
    if last:
        clear_latents(keys, kv_len - tile * TILE, Int32(stage * NUM_BLOCKS), NUM_STAGES * NUM_BLOCKS, thread)
    cute.arch.barrier(barrier_id=1 + stage, number_of_threads=128)
    cute.copy(store, store.retile(weights), to_shared[(None, None, None, stage)])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(p_full + stage)
    if last:  # all warps' zeros, before this warpgroup reads them
        cute.arch.barrier(barrier_id=1 + stage, number_of_threads=128)


@cute.jit
def _take_factor(
    shared: cute.Tensor,
    stage: cutlass.Constexpr,
    row0: Int32,
    factor: cute.Tensor,
    largest: cute.Tensor,
    total: cute.Tensor,
) -> None:
    for h in cutlass.range_constexpr(2):
        largest[h] = shared[stage, 0, row0 + 8 * h]
        factor[h] = shared[stage, 1, row0 + 8 * h]
        total[h] = total[h] * factor[h]


@cute.jit
def _wait_for_half(full: cute.Pointer, stage: cutlass.Constexpr, half: cutlass.Constexpr, phase: Int32) -> None:
    for block in cutlass.range_constexpr(_HALF):
        cute.arch.mbarrier_wait(full + (stage * NUM_BLOCKS + _HALF * half + block), phase)


@cute.jit
def _release(pair: cutlass.Constexpr, barrier: cute.Pointer) -> None:
    """A warp is done with a group of blocks; in a pair both CTAs load into both."""
    with cute.arch.elect_one():
        if cutlass.const_expr(pair):
            for rank in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive(barrier, rank)
        else:
            cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _mask(scores: cute.Tensor, token0: Int32, row0: Int32, col0: Int32, kv_len: Int32, task: Task) -> None:
    first_row = task.row_tile * NUM_ROWS
    if token0 + TILE > keys_seen(kv_len, first_row, task.rows, task.heads):
        for v in cutlass.range_constexpr(TILE // 2):
            row = first_row + row0 + v // 2 % 2 * 8
            if token0 + col0 + v % 2 + v // 4 * 8 >= keys_seen(kv_len, row, task.rows, task.heads):
                scores[v] = Float32(NOTHING)


@cute.jit
def _largest_of_row(scores: cute.Tensor, h: cutlass.Constexpr) -> Float32:
    largest = Float32(NOTHING)
    for j in cutlass.range_constexpr(TILE // 8):
        for i in cutlass.range_constexpr(2):
            largest = cute.arch.fmax(largest, scores[i + 2 * h + 4 * j])
    for step in cutlass.range_constexpr(2):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    return largest


@cute.jit
def _multiply(sums: cute.Tensor, factor: cute.Tensor) -> None:
    """Most tiles raise no maximum: their warps skip it."""
    if cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0):
        for v in cutlass.range_constexpr(_HALF_DIMS // 2):
            sums[v] = sums[v] * factor[v // 2 % 2]
