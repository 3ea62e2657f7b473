"""The warpgroups of a grouped product with quantised weights that multiply: their tiles, and sums of FP8."""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.grouped_gemm_parts import PASS_BYTES, STEP, from_lane
from dist_infer.kernels.cute.grouped_gemm_write import write
from dist_infer.kernels.cute.moe_copies import move_16_bytes
from dist_infer.kernels.cute.moe_schedule import look_up, tile_of
from dist_infer.kernels.cute.quantized_decode import factor_of, sum_decoded
from dist_infer.kernels.cute.quantized_parts import DEPTH, load_float, load_floats
from dist_infer.kernels.cute.quantized_write import move_in_places, pair_of, scatter, write_quantized

_ONE, _TWO = 64, 128  # pairs: up to so many are multiplied at a time, or half as many


@cute.jit
def multiply(
    v: cutlass.Constexpr,
    weights: cute.Tensor,
    row_tiles: cute.Pointer,
    scale_tiles: cute.Pointer,
    passing: cute.Pointer,
    global_scale: Any,
    order: cute.Tensor,
    out: cute.Tensor,
    out_scales: Any,
    tables: tuple[cute.Tensor, ...],
    full: cute.Pointer,
    empty: cute.Pointer,
    channels: Int32,
    channel_blocks: Int32,
    num_tiles: Int32,
    depth: Int32,
) -> None:
    """Each warpgroup has 64 rows of either box of weights, and all pairs.

    Shapes: weights bytes [row, column, box of the stages], swizzled.
    """
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta - 128
    group = cute.arch.make_warp_uniform(thread // 128)
    low = cute.make_rmem_tensor(cute.make_layout(v.pairs // 2), Float32)
    high = cute.make_rmem_tensor(cute.make_layout(v.pairs // 2), Float32)
    rows = cute.make_rmem_tensor(cute.make_layout(v.pairs // (4 if v.is_scattered else STEP)), Int32)
    stage, phase = Int32(0), Int32(0)
    lane = cute.arch.lane_idx()
    known = look_up(tables, lane, num_tiles, channel_blocks, v.pairs)
    factor = Float32(1.0)
    if cutlass.const_expr(v.is_nvfp4):
        factor = factor_of(global_scale)
    turn = Int32(0)
    while tile_of(turn) < num_tiles:
        if turn % 32 == 0 and turn > 0:
            known = look_up(tables, turn + lane, num_tiles, channel_blocks, v.pairs)
        _, block, first, count, longest = from_lane(known, turn % 32)
        if cutlass.const_expr(not v.quantizes):
            _find_rows(v, order, rows, first, count, thread)  # they are there when the sums are
        for which in cutlass.range_constexpr(len(v.sizes)):
            smaller = cutlass.const_expr(v.sizes[which - 1] if which else 0)
            if longest > smaller and longest <= v.sizes[which]:
                operands = (v, v.sizes[which], low, high, weights, row_tiles, scale_tiles, full, empty)
                if cutlass.const_expr(v.is_fp8):
                    stage, phase = _sum(*operands, stage, phase, depth, group)
                else:
                    stage, phase = sum_decoded(*operands, stage, phase, depth, thread)
        if cutlass.const_expr(v.is_nvfp4):
            for place in cutlass.range_constexpr(v.pairs // 2):
                low[place] *= factor
                high[place] *= factor
        buffer = passing.toint()
        if cutlass.const_expr(v.quantizes):
            write_quantized(v, low, high, buffer, out, out_scales, first, count, block, channels, thread)
        else:
            buffer += group * (v.num_passes * PASS_BYTES)
            own = (channels, thread % 128, group)
            if cutlass.const_expr(v.gate_up):
                move = move_16_bytes if v.is_fp8 else partial(move_in_places, v)
                write(v, low, high, buffer, rows, out, count, block * v.box + group * 64, *own, move)
            else:
                for box, sums in enumerate((low, high)):
                    channel = (2 * block + box) * v.box + group * 64
                    if cutlass.const_expr(v.is_scattered):
                        scatter(v, sums, rows, out, count, channel, channels, thread % 128)
                    else:
                        write(v, sums, None, buffer, rows, out, count, channel, *own)
        turn += 1


@cute.jit
def _find_rows(
    v: cutlass.Constexpr, order: cute.Tensor, rows: cute.Tensor, first: Int32, count: Int32, thread: Int32
) -> None:
    """Where the pairs go that a thread writes."""
    for idx in cutlass.range_constexpr(cute.size(rows)):
        pair = idx * STEP + thread % 128 // 8
        if cutlass.const_expr(v.is_scattered):
            pair = pair_of(idx, thread)
        rows[idx] = first + pair
        if cutlass.const_expr(not v.gate_up) and pair < count:
            rows[idx] = Int32(order[first + pair])


@cute.jit
def _sum(
    v: cutlass.Constexpr,
    size: cutlass.Constexpr,
    low: cute.Tensor,
    high: cute.Tensor,
    weights: cute.Tensor,
    row_tiles: cute.Pointer,
    scale_tiles: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    group: Int32,
):
    """low, high = products of `size` pairs with the rows of either box; (stage, phase) after them.

    The products of a stage are those of one block of scales: they are added to the sums with their scales, in float32.
    """
    parts = cutlass.const_expr(_parts_of(size))
    buffer_len = cutlass.const_expr(parts[0][2] // 2)
    products = cute.make_rmem_tensor(cute.make_layout(2 * buffer_len), Float32)
    lane = cute.arch.lane_idx()
    for place in cutlass.range_constexpr(size // 2):
        low[place] = Float32(0.0)
        high[place] = Float32(0.0)
    k = Int32(0)
    while k < depth:
        cute.arch.mbarrier_wait(full + stage, phase)
        cute.arch.fence_proxy("async.shared", space="cta")  # rows were not copied by TMA
        scales = scale_tiles.toint() + stage * v.stage_scale_bytes
        _multiply_part(v, parts[0], products.iterator, weights, row_tiles, stage, group)
        for idx in cutlass.range_constexpr(len(parts)):
            if cutlass.const_expr(idx + 1 < len(parts)):
                buffer = products.iterator + (idx + 1) % 2 * buffer_len
                _multiply_part(v, parts[idx + 1], buffer, weights, row_tiles, stage, group)
                warpgroup.wait_group(1)
            else:
                warpgroup.wait_group(0)
            sums = high if parts[idx][0] else low
            _add_scaled(v, parts[idx], sums, products.iterator + idx % 2 * buffer_len, scales, lane)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + stage)
        stage += 1
        if stage == v.num_stages:
            stage = Int32(0)
            phase ^= 1
        k += 1
    return stage, phase


def _parts_of(size: int) -> tuple[tuple[int, int, int], ...]:
    """(box, first pair, pairs) of what is multiplied at a time: a thread has room for the products of two parts."""
    count = 1 + (size > _ONE) + (size > _TWO)
    longest = -(-size // (8 * count)) * 8
    starts = range(0, size, longest)
    return tuple((box, start, min(longest, size - start)) for box in range(2) for start in starts)


@cute.jit
def _multiply_part(
    v: cutlass.Constexpr,
    part: cutlass.Constexpr,
    buffer: cute.Pointer,
    weights: cute.Tensor,
    row_tiles: cute.Pointer,
    stage: Int32,
    group: Int32,
) -> None:
    """The products of a part of a stage, not added to any."""
    box, start, pairs = part
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (64, pairs, 32),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (v.num_groups, 1, 1))
    mma_thread = mma.get_slice(group * 128)  # operands in shared memory are the warpgroup's
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    tokens_layout = cute.append(
        cute.tile_to_shape(atom, (pairs, DEPTH), order=(0, 1)).outer,
        cute.make_layout(v.num_stages, stride=v.pairs * DEPTH),
    )
    tokens_at = cute.recast_ptr(row_tiles + start * DEPTH, atom.inner, dtype=Float8E4M3FN)
    narrow = cute.make_tensor(cute.recast_ptr(weights.iterator, atom.inner, dtype=Float8E4M3FN), weights.layout)
    f_w = mma_thread.make_fragment_A(mma_thread.partition_A(narrow))
    f_t = mma_thread.make_fragment_B(mma_thread.partition_B(cute.make_tensor(tokens_at, tokens_layout)))
    products = cute.make_tensor(buffer, cute.make_layout(mma_thread.partition_shape_C((v.box, pairs))))
    warpgroup.fence()
    for step in cutlass.range_constexpr(DEPTH // 32):
        mma.set(warpgroup.Field.ACCUMULATE, step > 0)
        f_step = f_t[(None, None, step, stage)]
        cute.gemm(mma, products, f_w[(None, None, step, 2 * stage + box)], f_step, products)
    warpgroup.commit_group()


@cute.jit
def _add_scaled(
    v: cutlass.Constexpr,
    part: cutlass.Constexpr,
    sums: cute.Tensor,
    buffer: cute.Pointer,
    scales: Int32,
    lane: Int32,
) -> None:
    """Adds the products of a part to the sums, times the scales of pairs and weights."""
    box, start, pairs = part
    products = cute.make_tensor(buffer, cute.make_layout(pairs // 2))
    of_weights = load_float(scales + (v.pairs + box) * 4)
    for j in cutlass.range_constexpr(pairs // 8):
        even, odd = load_floats(scales + lane % 4 * 8 + start * 4 + 32 * j)
        even *= of_weights
        odd *= of_weights
        for h in cutlass.range_constexpr(2):
            at = cutlass.const_expr(4 * j + 2 * h)
            to = cutlass.const_expr(start // 2 + at)
            sums[to] = sums[to] + products[at] * even
            sums[to + 1] = sums[to + 1] + products[at + 1] * odd
