"""What the two warpgroups of mla_many_rows do with a tile: scores, weights, products, and what they hand each other.

A thread holds rows row0 and row0 + 8; value v = i + 2 h + 4 j of a fragment stands in row row0 + 8 h and column
col0 + i + 8 j.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite
from dist_infer.kernels.cute.mla_tiles import (
    BLOCK,
    BLOCK_BYTES,
    LATENT,
    NUM_BLOCKS,
    NUM_LATENT_BLOCKS,
    TILE,
    Task,
    clear_latents,
)

NUM_ROWS = 64
NUM_STAGES = 2
HALF_DIMS = LATENT // 2
_HALF = NUM_LATENT_BLOCKS // 2
_BLOCK_SIZE = BLOCK * TILE
_ORDER_BARRIER = 7
_SLACK = 8.0  # a maximum that is raised by less stays, so that few tiles have sums multiplied; weights are below 2^8
_PACK = {
    cutlass.BFloat16: "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
    cutlass.Float16: "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
}


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
        dtype, Float32, (NUM_ROWS, HALF_DIMS, 16), source, OperandMajorMode.K, OperandMajorMode.MN
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
def place_of_thread():
    """(row0, col0)."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % 128 // 32 * 16 + thread % 32 // 4, thread % 4 * 2


@cute.jit
def halves(keys: cute.Tensor) -> cute.Tensor:
    """The latents of the stages as [dim of a half, token, half, stage]."""
    kind = warpgroup.SmemLayoutAtomKind.MN_SW128
    atom = warpgroup.make_smem_layout_atom(kind, keys.element_type)
    half = cute.tile_to_shape(atom, (HALF_DIMS, TILE), order=(1, 0))
    both = cute.append(half.outer, cute.make_layout(2, stride=_HALF * _BLOCK_SIZE))
    stages = cute.append(both, cute.make_layout(NUM_STAGES, stride=NUM_BLOCKS * _BLOCK_SIZE))
    return cute.make_tensor(cute.recast_ptr(keys.iterator, half.inner), stages)


@cute.jit
def weights_memory(keys: cute.Tensor) -> cute.Tensor:
    """The rotated keys' block of each stage as [row, token, stage]."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, keys.element_type)
    block = cute.tile_to_shape(atom, (NUM_ROWS, TILE), order=(0, 1))
    stages = cute.append(block.outer, cute.make_layout(NUM_STAGES, stride=NUM_BLOCKS * _BLOCK_SIZE))
    return cute.make_tensor(cute.recast_ptr(keys.iterator + NUM_LATENT_BLOCKS * _BLOCK_SIZE, block.inner), stages)


@cute.jit
def score(
    pair: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    scores: cute.Tensor,
    f_q: cute.Tensor,
    f_k: cute.Tensor,
    full: cute.Pointer,
    phase: Int32,
    empty: cute.Pointer,
    busy: cutlass.Boolean,
    in_pair: cutlass.Boolean,
) -> None:
    """S = Q K^T of the tile of a stage, block by block as they arrive. A barrier is set for the next tile at once.

    Warpgroup 1 begins once warpgroup 0 has given all these products to the matrix units, if there is a tile for both:
    else both would be done late and at once. Warpgroup 0 may be `busy` with P V of the other stage, which it frees.
    """
    qk = score_mma(dtype)
    if cutlass.const_expr(stage == 1):
        cute.arch.barrier(barrier_id=_ORDER_BARRIER, number_of_threads=256)
    warpgroup.fence()
    for place in cutlass.range_constexpr(NUM_BLOCKS):
        block = cutlass.const_expr(block_order(stage)[place])
        cute.arch.mbarrier_wait(full + (stage * NUM_BLOCKS + block), phase)
        for k in cutlass.range_constexpr(BLOCK // 16):
            qk.set(warpgroup.Field.ACCUMULATE, place + k > 0)
            q_step = f_q[(None, None, block * (BLOCK // 16) + k)]
            cute.gemm(qk, scores, q_step, f_k[(None, None, k, stage * NUM_BLOCKS + block)], scores)
        if cutlass.const_expr(stage == 0 and place == 0):
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if busy:
                release(pair, empty + group_of(1, _HALF))
    warpgroup.commit_group()
    if cutlass.const_expr(stage == 0):
        _let_other_score(in_pair)
    thread, _, _ = cute.arch.thread_idx()
    slot = thread % 128
    if slot < NUM_BLOCKS:
        cute.arch.mbarrier_arrive_and_expect_tx(full + (stage * NUM_BLOCKS + slot), BLOCK_BYTES)
    warpgroup.wait_group(0)
    cute.arch.barrier(barrier_id=1 + stage, number_of_threads=128)


@cute.jit
def _let_other_score(has_tile: cutlass.Boolean) -> None:
    if has_tile:
        cute.arch.barrier_arrive(barrier_id=_ORDER_BARRIER, number_of_threads=256)


@cute.jit
def weigh(
    scores: cute.Tensor,
    weights: cute.Tensor,
    total: cute.Tensor,
    largest: cute.Tensor,
    factor: cute.Tensor,
    shared: cute.Tensor,
    stage: cutlass.Constexpr,
    tile: Int32,
    seen: cute.Tensor,  # keys, of rows row0 and row0 + 8
    masked_from: Int32,  # the tile
    task: Task,
) -> None:
    """P of a tile in registers, and what earlier sums are multiplied by."""
    row0, col0 = place_of_thread()
    if tile >= masked_from:
        for h in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(TILE // 8):
                for i in cutlass.range_constexpr(2):
                    if tile * TILE + col0 + i + 8 * j >= seen[h]:
                        scores[i + 2 * h + 4 * j] = Float32(NOTHING)
    references = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for h in cutlass.range_constexpr(2):
        known = largest[h]
        found = largest_of_row(scores, h) * task.scale
        if found > known + _SLACK:
            largest[h] = found
        references[h] = finite(largest[h])
        factor[h] = exp2(known - references[h])
        total[h] = total[h] * factor[h]
        if col0 == 0:
            shared[stage, 0, row0 + 8 * h] = largest[h]
            shared[stage, 1, row0 + 8 * h] = factor[h]
    pairs = cute.recast_tensor(weights, Int32)
    for j in cutlass.range_constexpr(TILE // 8):
        for h in cutlass.range_constexpr(2):
            p = [exp2(scores[i + 2 * h + 4 * j] * task.scale - references[h]) for i in range(2)]
            total[h] += p[0]
            total[h] += p[1]
            # what a compiler may put off it computes twice, for the sum and for the weights
            pairs[h + 2 * j] = cute.arch.inline_ptx(
                _PACK[weights.element_type], write_only_types=[Int32], read_only_args=p
            )


@cute.jit
def hand_over(
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
    cute.copy(store, store.retile(weights), to_shared[(None, None, None, stage)])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(p_full + stage)
    if last:  # all warps' zeros, before this warpgroup reads them
        cute.arch.barrier(barrier_id=1 + stage, number_of_threads=128)


@cute.jit
def await_weights(
    p_full: cute.Pointer,
    shared: cute.Tensor,
    stage: cutlass.Constexpr,
    phase: Int32,
    factor: cute.Tensor,
    largest: cute.Tensor,
    total: cute.Tensor,
) -> None:
    """The other warpgroup's P of a stage has come; it had seen all of the tile."""
    row0, _ = place_of_thread()
    cute.arch.mbarrier_wait(p_full + stage, phase)
    for h in cutlass.range_constexpr(2):
        largest[h] = shared[stage, 0, row0 + 8 * h]
        factor[h] = shared[stage, 1, row0 + 8 * h]
        total[h] = total[h] * factor[h]


@cute.jit
def add_product(
    pv: cute.TiledMma, sums: cute.Tensor, factor: cute.Tensor, weights: cute.Tensor, values: cute.Tensor
) -> None:
    """O = factor O + P V, which goes on when this returns. Few tiles raise a maximum; other warps don't multiply."""
    if cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0):
        for v in cutlass.range_constexpr(HALF_DIMS // 2):
            sums[v] = sums[v] * factor[v // 2 % 2]
    warpgroup.fence()
    for step in cutlass.range_constexpr(TILE // 16):
        cute.gemm(pv, sums, weights[(None, None, step)], values[(None, None, step)], sums)
    warpgroup.commit_group()


@cute.jit
def finish_product(pair: cutlass.Constexpr, group: cute.Pointer) -> None:
    """The product is done, and its latents are free."""
    warpgroup.wait_group(0)
    release(pair, group)


@cute.jit
def release(pair: cutlass.Constexpr, group: cute.Pointer) -> None:
    """A warp is done with a group of blocks; in a pair both CTAs load into both."""
    with cute.arch.elect_one():
        if cutlass.const_expr(pair):
            for rank in cutlass.range_constexpr(2):
                cute.arch.mbarrier_arrive(group, rank)
        else:
            cute.arch.mbarrier_arrive(group)


@cute.jit
def largest_of_row(scores: cute.Tensor, h: cutlass.Constexpr) -> Float32:
    largest = Float32(NOTHING)
    for j in cutlass.range_constexpr(TILE // 8):
        for i in cutlass.range_constexpr(2):
            largest = cute.arch.fmax(largest, scores[i + 2 * h + 4 * j])
    for step in cutlass.range_constexpr(2):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    return largest
