"""The warpgroups of a grouped product that multiply, and what becomes of their sums."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute.grouped_gemm_parts import BOX, DEPTH, PASS, PASS_BYTES, STEP, from_lane
from dist_infer.kernels.cute.moe_copies import move_16_bytes, store_transposed
from dist_infer.kernels.cute.moe_schedule import look_up


@cute.jit
def multiply(
    v: cutlass.Constexpr,
    weights: cute.Tensor,
    row_tiles: cute.Tensor,
    passing: cute.Pointer,
    order: cute.Tensor,
    out: cute.Tensor,
    tiles_before: cute.Tensor,
    first_pairs: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    channels: Int32,
    channel_blocks: Int32,
    num_tiles: Int32,
    depth: Int32,
) -> None:
    """The warpgroups that multiply: each has 64 rows of either box of weights, and all pairs."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta - 128
    group = cute.arch.make_warp_uniform(thread // 128)
    low = cute.make_rmem_tensor(cute.make_layout(v.pairs // 2), Float32)
    high = cute.make_rmem_tensor(cute.make_layout(v.pairs // 2), Float32)
    rows = cute.make_rmem_tensor(cute.make_layout(v.pairs // STEP), Int32)
    stage, phase = Int32(0), Int32(0)
    tile, _, _ = cute.arch.block_idx()
    turn, _, _ = cute.arch.grid_dim()
    lane = cute.arch.lane_idx()
    known = look_up(tiles_before, first_pairs, tile + lane * turn, num_tiles, channel_blocks, v.pairs)
    idx = Int32(0)
    while tile < num_tiles:
        if idx == 32:
            idx = Int32(0)
            known = look_up(tiles_before, first_pairs, tile + lane * turn, num_tiles, channel_blocks, v.pairs)
        _, block, first, count, longest = from_lane(known, idx)
        idx += 1
        for step in cutlass.range_constexpr(v.pairs // STEP):  # read here, they are there when the sums are
            pair = step * STEP + thread % 128 // 8
            rows[step] = first + pair
            if cutlass.const_expr(not v.gate_up) and pair < count:
                rows[step] = order[first + pair]
        for which in cutlass.range_constexpr(len(v.sizes)):
            smaller = cutlass.const_expr(v.sizes[which - 1] if which else 0)
            if longest > smaller and longest <= v.sizes[which]:
                stage, phase = _sum(
                    v, v.sizes[which], low, high, weights, row_tiles, full, empty, stage, phase, depth, group
                )
        channel = block * BOX + group * 64
        if cutlass.const_expr(not v.gate_up):
            channel += block * BOX
        buffer = passing.toint() + group * (2 * PASS_BYTES)
        place = (count, channel, channels, thread % 128, group)
        if cutlass.const_expr(v.gate_up):
            _write(v, low, high, buffer, rows, out, *place)
        else:
            _write(v, low, None, buffer, rows, out, *place)
            _write(v, high, None, buffer, rows, out, count, channel + BOX, *place[2:])
        tile += turn


@cute.jit
def _sum(
    v: cutlass.Constexpr,
    size: cutlass.Constexpr,
    low: cute.Tensor,
    high: cute.Tensor,
    weights: cute.Tensor,  # [row, channel, box of the stages]
    row_tiles: cute.Tensor,  # [pair, channel, stage]
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    group: Int32,
):
    """low, high = products of `size` pairs with the rows of either box; (stage, phase) after them."""
    mma = _make_mma(v.number, size)
    mma_thread = mma.get_slice(group * 128)  # operands in shared memory are the warpgroup's
    tokens_layout = cute.append(
        cute.tile_to_shape(_k_atom(v.number), (size, DEPTH), order=(0, 1)).outer,
        cute.make_layout(v.num_stages, stride=v.pairs * DEPTH),
    )
    tokens = cute.make_tensor(row_tiles.iterator, tokens_layout)
    f_w = mma_thread.make_fragment_A(mma_thread.partition_A(weights))
    f_t = mma_thread.make_fragment_B(mma_thread.partition_B(tokens))
    sums_layout = cute.make_layout(mma_thread.partition_shape_C((BOX, size)))
    low_sums = cute.make_tensor(low.iterator, sums_layout)
    high_sums = cute.make_tensor(high.iterator, sums_layout)
    k = Int32(0)
    last = stage
    while k < depth:
        cute.arch.mbarrier_wait(full + stage, phase)
        if cutlass.const_expr(v.gate_up):
            cute.arch.fence_proxy("async.shared", space="cta")  # rows were not copied by TMA
        warpgroup.fence()
        for step in cutlass.range_constexpr(DEPTH // 16):
            if cutlass.const_expr(step == 0):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
            else:
                mma.set(warpgroup.Field.ACCUMULATE, True)
            f_step = f_t[(None, None, step, stage)]
            cute.gemm(mma, low_sums, f_w[(None, None, step, 2 * stage)], f_step, low_sums)
            cute.gemm(mma, high_sums, f_w[(None, None, step, 2 * stage + 1)], f_step, high_sums)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            _free(empty + last)
        last = stage
        stage += 1
        if stage == v.num_stages:
            stage = Int32(0)
            phase ^= 1
        k += 1
    warpgroup.wait_group(0)
    _free(empty + last)
    return stage, phase


@cute.jit
def _free(barrier: cute.Pointer) -> None:
    """A warp has read a stage."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def _write(
    v: cutlass.Constexpr,
    values: cute.Tensor,
    factors: Any,
    buffer: Int32,
    rows: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    channel: Int32,
    channels: Int32,
    thread: Int32,
    group: Int32,
) -> None:
    """64 channels of all pairs of a tile, rounded and turned so that a pair's channels stand together.

    A thread's value i + 2 h + 4 j is of channel 16 warp + lane / 4 + 8 h and pair 8 j + 2 (lane % 4) + i.
    """
    warp, lane = thread // 32, thread % 32
    chunk = warp * 2 + lane // 8 % 2
    own = lane % 8 + lane // 16 * 8
    to_shared = buffer + own * 128 + (chunk ^ (own % 8)) * 16
    out_chunk, out_pair = thread % 8, thread // 8
    from_shared = buffer + out_pair * 128 + (out_chunk ^ (out_pair % 8)) * 16
    out_channel = channel + out_chunk * 8
    row_bytes = out.stride[0] * 2
    target = out.iterator.toint() + Int64(out_channel * 2)
    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)  # what was written before has been read
    for turn in cutlass.range_constexpr((v.pairs + PASS - 1) // PASS):
        if turn * PASS < count:
            place = cutlass.const_expr(turn % 2 * PASS_BYTES)
            halves = cutlass.const_expr(min(2, (v.pairs - turn * PASS) // STEP))
            for half in cutlass.range_constexpr(halves):
                at = cutlass.const_expr((turn * PASS + half * STEP) // 2)
                store_transposed(
                    to_shared + place + half * (STEP * 128),
                    *(_packed(v, values, factors, at + 2 * idx) for idx in range(4)),
                )
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            for half in cutlass.range_constexpr(halves):
                pair = turn * PASS + half * STEP + out_pair
                if pair < count and out_channel < channels:
                    row = rows[turn * (PASS // STEP) + half]
                    move_16_bytes(target + Int64(row) * row_bytes, from_shared + place + half * (STEP * 128))


@cute.jit
def _packed(v: cutlass.Constexpr, values: cute.Tensor, factors: Any, at: cutlass.Constexpr) -> Int32:
    """Two values, or what the activation makes of them and factors, as one register."""
    pair = cute.make_rmem_tensor(cute.make_layout(2), v.number)
    for idx in cutlass.range_constexpr(2):
        value = values[at + idx]
        if cutlass.const_expr(factors is not None):
            value = _gated(v, value, factors[at + idx])
        pair[idx] = value.to(v.number)
    return cute.recast_tensor(pair, Int32)[0]


def _k_atom(dtype):
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)


def _make_mma(dtype, size):
    """[128 rows of weights, pairs] for both warpgroups."""
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (64, size, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (2, 1, 1))


@cute.jit
def _gated(v: cutlass.Constexpr, gate: Float32, up: Float32) -> Float32:
    """What the activation makes of a gate and an up."""
    if cutlass.const_expr(v.activation is GatedActivation.SILU):
        result = gate * _sigmoid(gate) * up
    else:
        if gate > 7.0:
            gate = Float32(7.0)
        if up > 7.0:
            up = Float32(7.0)
        if up < -7.0:
            up = Float32(-7.0)
        result = gate * _sigmoid(gate * 1.702) * (up + 1.0)
    return result


@cute.jit
def _sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -math.log2(math.e), fastmath=True))
