"""What the two warpgroups of mla_narrow_pairs do with a tile: scores, weights, products, and what they hand each other.

Weights are float16 and values are widened to it, or both are E4M3 (`rounds`). Of E4M3 a step takes 32 tokens, a word of
the left operand four: tokens 2 q, 2 q + 1 and those 8 on, so that weights stand in that order too.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.mla_few_rows import column_of
from dist_infer.kernels.cute.mla_narrow import narrow_mma, release, wait_for
from dist_infer.kernels.cute.mla_narrow_keys import multiply_slot, score_mma
from dist_infer.kernels.cute.mla_operands import (
    SLOTS_OF_TILE,
    WEIGHT_EXPONENT,
    clear_values,
    gather_values,
    load_values,
    pack,
    pack_four,
    store_narrow_weights,
    widen_values,
)
from dist_infer.kernels.cute.mla_shared_tiles import NUM_ROWS, largest_of_row
from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, keys_seen
from dist_infer.kernels.cute.mla_tiles import NUM_LATENT_BLOCKS, TILE, Task, wrapped

HALF = NUM_LATENT_BLOCKS // 2
# By whether weights are E4M3: a maximum that is raised by less stays, so that few tiles have sums multiplied.
_SLACK = {False: 8, True: 2}
EXPONENT = {False: WEIGHT_EXPONENT - _SLACK[False], True: 8 - _SLACK[True]}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the warpgroups leave in shared memory for both, and the barriers."""

    shared: cute.Tensor  # [warpgroup, (running maximum, factor), row] of its last tile
    raised: cute.Tensor  # [warp, warpgroup], not 0 if a factor isn't 1
    full: cute.Pointer
    empty: cute.Pointer
    p_full: cute.Pointer
    p_empty: cute.Pointer


def value_mma(rounds):
    """O^T = V^T P^T of 64 dims, which come from registers: of E4M3, or widened to float16."""
    if not rounds:
        return narrow_mma(NUM_ROWS)
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (TILE, NUM_ROWS, 32),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def score(
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
def weigh(
    rounds: cutlass.Constexpr,
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
    """P of a tile as words of two float16 or four E4M3, and what earlier sums are multiplied by."""
    _mask(scores, tile * TILE, row0, col0, kv_len, task)
    factor = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for h in cutlass.range_constexpr(2):
        known = largest[h]
        found = largest_of_row(scores, h) * scales[h]
        if found > known + _SLACK[rounds]:
            largest[h] = found
        reference = finite(largest[h])
        factor[h] = exp2(known - reference)
        if col0 == 0:
            exchange.shared[stage, 0, row0 + 8 * h] = largest[h]
            exchange.shared[stage, 1, row0 + 8 * h] = factor[h]
        total[h] = total[h] * factor[h]
        for unit in cutlass.range_constexpr(TILE // 16):
            first = cutlass.const_expr(2 * h + 8 * unit)
            p = [exp2(scores[first + i] * scales[h] - (reference - EXPONENT[rounds])) for i in (0, 1, 4, 5)]
            total[h] += p[0] + p[1] + (p[2] + p[3])
            if cutlass.const_expr(rounds):  # at once, or each exponential is computed twice
                weight_words[4 * h + unit] = pack_four(p)
            else:
                weight_words[first // 2] = pack(p[0], p[1])
                weight_words[first // 2 + 2] = pack(p[2], p[3])
    any_raised = cute.arch.vote_any_sync(factor[0] != 1.0 or factor[1] != 1.0)
    exchange.raised[row0 // 16, stage] = Int32(any_raised)


@cute.jit
def hand_over(
    rounds: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    store: cute.TiledCopy,
    weights: cute.Tensor,
    weight_words: cute.Tensor,
    to_shared: cute.Tensor,
    weights_at: Int32,
    row0: Int32,
    exchange: Exchange,
) -> None:
    """P to both warpgroups; all of this one have read the tile's keys."""
    if cutlass.const_expr(rounds):
        place = weights_at + stage * (NUM_ROWS * TILE)
        store_narrow_weights(weight_words, place, row0, cute.arch.lane_idx() % 4)
    else:
        cute.copy(store, store.retile(weights), to_shared[(None, None, None, stage)])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(exchange.p_full + stage)


@cute.jit
def take_factor(
    shared: cute.Tensor, stage: cutlass.Constexpr, row0: Int32, largest: cute.Tensor, total: cute.Tensor
) -> None:
    for h in cutlass.range_constexpr(2):
        largest[h] = shared[stage, 0, row0 + 8 * h]
        total[h] = total[h] * shared[stage, 1, row0 + 8 * h]


@cute.jit
def add_values(
    rounds: cutlass.Constexpr,
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
    mma = value_mma(rounds)
    dtype, steps = (Float8E4M3FN, 1) if cutlass.const_expr(rounds) else (Float16, 2)  # of 32 or 16 tokens
    size = cutlass.const_expr(32 // dtype.width)
    words = [cute.make_rmem_tensor(cute.make_layout(8 * steps), Int32) for _ in range(2)]
    loaded = cute.make_rmem_tensor(cute.make_layout(8), Int32)
    operand_layout = cute.make_layout(((size, 2, 2), 1, 2 * steps), stride=((1, size, 2 * size), 0, 4 * size))
    f_a = [cute.make_tensor(cute.recast_tensor(of_turn, dtype).iterator, operand_layout) for of_turn in words]
    own = cutlass.const_expr((HALF * group, HALF * group + HALF))
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
            for block in cutlass.range_constexpr(HALF):
                for h in cutlass.range_constexpr(2):
                    v = cutlass.const_expr(c % 2 + 2 * h + c // 2 * 4)
                    sums[block][v] = sums[block][v] * factor
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for turn in cutlass.range_constexpr(HALF):
        if cutlass.const_expr(turn > 1):
            warpgroup.wait_group(1)
        if cutlass.const_expr(rounds):
            gather_values(loaded, words[turn % 2])
        else:
            widen_values(loaded, words[turn % 2])
        if cutlass.const_expr(turn + 1 < HALF):
            load_values(own[0] + turn + 1, base, slot, num_slots, value_row, loaded)
        for place in cutlass.range_constexpr(SLOTS_OF_TILE):
            if cutlass.const_expr(last_turns[place] == turn):
                release(exchange.empty + wrapped(slot + place, num_slots))
        warpgroup.fence()
        for k in cutlass.range_constexpr(steps):
            for idx in cutlass.range_constexpr(2):
                block = cutlass.const_expr(turn // 2 * 2 + idx)
                p_step = f_p[(None, None, turn % 2 * steps + k, stage)]
                cute.gemm(mma, sums[block], f_a[turn % 2][(None, None, idx * steps + k)], p_step, sums[block])
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
