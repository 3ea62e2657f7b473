"""Latent decode of 64 query rows by two warpgroups that share every tile.

Tile t belongs to warpgroup t % 2: it makes the tile's weights P in registers and leaves them in shared memory for the
other one. Both then add P V to the half of the dims that they hold. The running maxima pass from one to the other, so
that both halves have one scale. A warpgroup scores its own next tile once it has taken in the other one's.

A thread holds rows row0 and row0 + 8; value v = i + 2 h + 4 j of a fragment stands in row row0 + 8 h and column
col0 + i + 8 j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, keys_seen, normalise
from dist_infer.kernels.cute.mla_tiles import (
    BLOCK,
    LATENT,
    NUM_BLOCKS,
    NUM_LATENT_BLOCKS,
    TILE,
    clear_latents,
    describe_parts,
    part_slot,
    tiles_of,
)

NUM_ROWS = 64
NUM_STAGES = 2  # a stage holds a tile: the rotated keys, whose block is free again first, and then the latents
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


@cute.jit
def attend_many_rows(
    keys: cute.Tensor,  # [token, column, stage * 9 + block]
    queries: cute.Tensor,  # [row, column]
    probabilities: cute.Tensor,  # [row, token, 1]
    shared: cute.Tensor,  # [warpgroup, (running maximum, factor), row] of its last tile
    totals: cute.Tensor,  # [warpgroup, row], on the queries' memory
    full: cute.Pointer,
    empty: cute.Pointer,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    p_full: cute.Pointer,
    kv_lens: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    part_out: cute.Tensor,
    part_lse: cute.Tensor,
    parts: cute.Tensor,
    rows: Int32,
    row_tiles: Int32,
    row_tile: Int32,
    heads: Int32,
    scale: Float32,
    first: Int32,
    end: Int32,
    seq: Int32,
    before: Int32,
    chunk: Int32,
    worker: Int32,
) -> None:
    """What the consumer warpgroups do with a worker's tiles [first, end), of which the first is of sequence `seq`."""
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
    f_q = qk_thread.make_fragment_A(qk_thread.partition_A(queries))
    f_k = qk_thread.make_fragment_B(qk_thread.partition_B(keys))
    f_v = own_thread.make_fragment_B(own_thread.partition_B(_halves(keys)))
    f_p = other_thread.make_fragment_A(other_thread.partition_A(probabilities))
    scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((NUM_ROWS, TILE)))
    sums = own_thread.make_fragment_C(own_thread.partition_shape_C((NUM_ROWS, _HALF_DIMS)))
    weights = cute.make_rmem_tensor(scores.layout, dtype)
    # the accumulator's values of 16 tokens are the operand's values of one step
    operand_layout = cute.make_layout(((2, 2, 2), 1, TILE // 16), stride=((1, 2, 4), 0, 8))
    f_w = cute.make_tensor(weights.iterator, operand_layout)
    store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    store = cute.make_tiled_copy_C(store_atom, score_mma(dtype)).get_slice(thread)
    to_shared = store.partition_D(probabilities)[(None, None, None, 0)]
    total = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    factor = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    stage, phase, q_phase = Int32(0), Int32(0), Int32(0)
    while first < end:
        tiles = tiles_of(kv_lens, seq)
        begin = first - before
        stop = cutlass.min(end - before, tiles)
        kv_len = kv_lens[seq]
        total.fill(0.0)
        sums.fill(0.0)
        cute.arch.mbarrier_wait(q_full, q_phase)
        q_phase ^= 1
        if stage == group:
            _score(dtype, scores, f_q, f_k, full, empty, stage, phase)
        tile = begin
        while tile < stop:
            if stage == group:
                token0 = tile * TILE
                _scale_and_mask(scores, scale, token0, row0, col0, kv_len, rows, row_tile, heads)
                for h in cutlass.range_constexpr(2):
                    known = Float32(NOTHING)
                    if tile > begin:
                        known = shared[1 - group, 0, row0 + 8 * h]
                    largest = _largest_of_row(scores, known, h)
                    reference = finite(largest)
                    factor[h] = exp2(known - reference)
                    if lane % 4 == 0:
                        shared[group, 0, row0 + 8 * h] = largest
                        shared[group, 1, row0 + 8 * h] = factor[h]
                    total[h] = total[h] * factor[h]
                    for j in cutlass.range_constexpr(TILE // 8):
                        for i in cutlass.range_constexpr(2):
                            p = exp2(scores[i + 2 * h + 4 * j] - reference)
                            total[h] += p
                            weights[i + 2 * h + 4 * j] = p.to(dtype)
                last = token0 + TILE > kv_len
                if last:
                    clear_latents(keys, kv_len - token0, stage * NUM_BLOCKS + 1, NUM_STAGES * NUM_BLOCKS, thread)
                cute.copy(store, store.retile(weights), to_shared)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(p_full + group)
                if last:  # all warps' zeros, before this warpgroup reads them
                    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                _multiply(sums, factor)
                warpgroup.fence()
                pv_own.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(TILE // 16):
                    cute.gemm(pv_own, sums, f_w[(None, None, k)], f_v[(None, None, k, group, stage)], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            else:
                for block in cutlass.range_constexpr(_HALF):
                    cute.arch.mbarrier_wait(full + _latent_block(stage, group, block), phase)
                cute.arch.mbarrier_wait(p_full + stage, phase)
                for h in cutlass.range_constexpr(2):
                    factor[h] = shared[stage, 1, row0 + 8 * h]
                    total[h] = total[h] * factor[h]
                _multiply(sums, factor)
                warpgroup.fence()
                pv_other.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(TILE // 16):
                    cute.gemm(pv_other, sums, f_p[(None, None, k, 0)], f_v[(None, None, k, group, stage)], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
            for block in cutlass.range_constexpr(_HALF):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + _latent_block(stage, group, block))
            if stage != group and tile + 1 < stop:
                _score_next(dtype, scores, f_q, f_k, full, empty, stage, phase)
            if stage == 1:
                phase ^= 1
            stage ^= 1
            tile += 1
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)  # the queries' memory is free
        for h in cutlass.range_constexpr(2):
            summed = total[h]
            for step in cutlass.range_constexpr(2):
                summed += cute.arch.shuffle_sync_bfly(summed, 1 << step)
            if lane % 4 == 0:
                totals[group, row0 + 8 * h] = summed
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        whole = begin == 0 and stop == tiles
        where = part_slot(worker, row_tiles, row_tile, Int32(0))
        if begin == 0:
            where += 1
            if thread_of_cta == 128:
                describe_parts(parts, seq, before, tiles, chunk)
        for h in cutlass.range_constexpr(2):
            column = row0 + 8 * h
            row = row_tile * NUM_ROWS + column
            inverse, score = normalise(totals[0, column] + totals[1, column], shared[1 - stage, 0, column])
            if row < rows:
                if group == 0 and lane % 4 == 0:
                    if whole:
                        lse[seq * rows + row] = score
                    else:
                        part_lse[where, column] = score
                for j in cutlass.range_constexpr(_HALF_DIMS // 8):
                    for i in cutlass.range_constexpr(2):
                        value = sums[i + 2 * h + 4 * j] * inverse
                        dim = _HALF_DIMS * group + 8 * j + col0 + i
                        if whole:
                            out[seq * rows + row, dim] = value.to(dtype)
                        else:
                            part_out[where, column, dim] = value
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(q_empty)
        first = before + stop
        before += tiles
        seq += 1


@cute.jit
def _halves(keys: cute.Tensor) -> cute.Tensor:
    """The latents of the stages as [dim of a half, token, half, stage]."""
    kind = warpgroup.SmemLayoutAtomKind.MN_SW128
    atom = warpgroup.make_smem_layout_atom(kind, keys.element_type)
    half = cute.tile_to_shape(atom, (_HALF_DIMS, TILE), order=(1, 0))
    halves = cute.append(half.outer, cute.make_layout(2, stride=_HALF * _BLOCK_SIZE))
    stages = cute.append(halves, cute.make_layout(NUM_STAGES, stride=NUM_BLOCKS * _BLOCK_SIZE))
    return cute.make_tensor(cute.recast_ptr(keys.iterator + _BLOCK_SIZE, half.inner), stages)


@cute.jit
def _score_next(
    dtype: cutlass.Constexpr,
    scores: cute.Tensor,
    f_q: cute.Tensor,
    f_k: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Int32,
    phase: Int32,
) -> None:
    if stage == 1:
        phase ^= 1
    _score(dtype, scores, f_q, f_k, full, empty, 1 - stage, phase)


@cute.jit
def _score(
    dtype: cutlass.Constexpr,
    scores: cute.Tensor,
    f_q: cute.Tensor,
    f_k: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Int32,
    phase: Int32,
) -> None:
    """S = Q K^T of the tile of a stage, block by block as they arrive; the rotated keys' block is free afterwards."""
    qk = score_mma(dtype)
    warpgroup.fence()
    for block in cutlass.range_constexpr(NUM_BLOCKS):
        cute.arch.mbarrier_wait(full + stage * NUM_BLOCKS + block, phase)
        for k in cutlass.range_constexpr(BLOCK // 16):
            qk.set(warpgroup.Field.ACCUMULATE, block + k > 0)
            q_step = f_q[(None, None, (block + NUM_LATENT_BLOCKS) % NUM_BLOCKS * (BLOCK // 16) + k)]
            cute.gemm(qk, scores, q_step, f_k[(None, None, k, stage * NUM_BLOCKS + block)], scores)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(empty + stage * NUM_BLOCKS)


@cute.jit
def _scale_and_mask(
    scores: cute.Tensor,
    scale: Float32,
    token0: Int32,
    row0: Int32,
    col0: Int32,
    kv_len: Int32,
    rows: Int32,
    row_tile: Int32,
    heads: Int32,
) -> None:
    for v in cutlass.range_constexpr(TILE // 2):
        scores[v] = scores[v] * scale
    if token0 + TILE > keys_seen(kv_len, Int32(0), rows, heads):
        for v in cutlass.range_constexpr(TILE // 2):
            row = row_tile * NUM_ROWS + row0 + v // 2 % 2 * 8
            if token0 + col0 + v % 2 + v // 4 * 8 >= keys_seen(kv_len, row, rows, heads):
                scores[v] = Float32(NOTHING)


@cute.jit
def _largest_of_row(scores: cute.Tensor, known: Float32, h: cutlass.Constexpr) -> Float32:
    largest = known
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


def _latent_block(stage, group, block):
    return stage * NUM_BLOCKS + 1 + _HALF * group + block
