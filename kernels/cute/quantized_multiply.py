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
from dist_infer.kernels.cute.quantized_parts import DEPTH, Variant, load_float, load_floats, slot_after
from dist_infer.kernels.cute.quantized_write import move_in_places, pair_of, scatter, write_quantized

_OTHERS, _ROWS = 16, 4  # registers of a thread that have neither sums nor products, and that know rows of results


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
    stage, phase, slot = Int32(0), Int32(0), Int32(0)
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
                    stage, phase, slot = _sum(*operands, stage, phase, slot, depth, group)
                else:
                    stage, phase, slot = sum_decoded(*operands, stage, phase, slot, depth, thread)
        if cutlass.const_expr(v.is_nvfp4):
            for place in cutlass.range_constexpr(v.pairs // 2):
                low[place] *= factor
                high[place] *= factor
        _leave(v, low, high, passing.toint(), rows, out, out_scales, first, count, block, channels, thread, group)
        turn += 1


@cute.jit
def _leave(
    v: cutlass.Constexpr,
    low: cute.Tensor,
    high: cute.Tensor,
    buffer: Int32,
    rows: cute.Tensor,
    out: cute.Tensor,
    out_scales: Any,
    first: Int32,
    count: Int32,
    block: Int32,
    channels: Int32,
    thread: Int32,
    group: Int32,
) -> None:
    """A tile's sums on their way out."""
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
    slot: Int32,
    depth: Int32,
    group: Int32,
):
    """low, high = products of `size` pairs with the rows of either box; (stage, phase, slot) after them.

    The products of a stage are those of one block of scales: they are added to the sums with their scales, in float32.
    """
    num_buffers = cutlass.const_expr(_num_buffers(v, size))
    products = cute.make_rmem_tensor(cute.make_layout((size // 2, num_buffers)), Float32)
    lane = cute.arch.lane_idx()
    for place in cutlass.range_constexpr(size // 2):
        low[place] = Float32(0.0)
        high[place] = Float32(0.0)
    k = Int32(0)
    while k < depth:
        cute.arch.mbarrier_wait(full + stage, phase)
        cute.arch.fence_proxy("async.shared", space="cta")  # rows were not copied by TMA
        scales = scale_tiles.toint() + slot * v.slot_bytes
        ahead = cutlass.const_expr(num_buffers - 1)  # boxes that are multiplied while one is added
        for box in cutlass.range_constexpr(-ahead, 2):
            begun = cutlass.const_expr(box + ahead)
            if cutlass.const_expr(begun < 2):
                own = products[None, begun % num_buffers]
                _multiply_box(v, size, begun, own, weights, row_tiles, stage, group)
            if cutlass.const_expr(box >= 0):
                warpgroup.wait_group(min(ahead, 1 - box))
                _add_scaled(v, size, box, high if box else low, products[None, box % num_buffers], scales, lane)
        cute.arch.sync_warp()  # all lanes have read their scales
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + stage)
        stage += 1
        if stage == v.num_stages:
            stage = Int32(0)
            phase ^= 1
        slot = slot_after(v, slot, k)
        k += 1
    return stage, phase, slot


def _num_buffers(v: Variant, size: int) -> int:
    """For the products of both boxes, where registers allow it, else of one."""
    return 1 + (size <= v.registers[1] - _OTHERS - (0 if v.quantizes else _ROWS) - v.pairs)


@cute.jit
def _multiply_box(
    v: cutlass.Constexpr,
    size: cutlass.Constexpr,
    box: cutlass.Constexpr,
    products: cute.Tensor,
    weights: cute.Tensor,
    row_tiles: cute.Pointer,
    stage: Int32,
    group: Int32,
) -> None:
    """The products of one box of a stage, not added to any."""
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (64, size, 32),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (v.num_groups, 1, 1))
    mma_thread = mma.get_slice(group * 128)  # operands in shared memory are the warpgroup's
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
    tokens_layout = cute.append(
        cute.tile_to_shape(atom, (size, DEPTH), order=(0, 1)).outer,
        cute.make_layout(v.num_stages, stride=v.pairs * DEPTH),
    )
    tokens_at = cute.recast_ptr(row_tiles, atom.inner, dtype=Float8E4M3FN)
    narrow = cute.make_tensor(cute.recast_ptr(weights.iterator, atom.inner, dtype=Float8E4M3FN), weights.layout)
    f_w = mma_thread.make_fragment_A(mma_thread.partition_A(narrow))
    f_t = mma_thread.make_fragment_B(mma_thread.partition_B(cute.make_tensor(tokens_at, tokens_layout)))
    sums = cute.make_tensor(products.iterator, cute.make_layout(mma_thread.partition_shape_C((v.box, size))))
    warpgroup.fence()
    for step in cutlass.range_constexpr(DEPTH // 32):
        mma.set(warpgroup.Field.ACCUMULATE, step > 0)
        f_step = f_t[(None, None, step, stage)]
        cute.gemm(mma, sums, f_w[(None, None, step, 2 * stage + box)], f_step, sums)
    warpgroup.commit_group()


@cute.jit
def _add_scaled(
    v: cutlass.Constexpr,
    size: cutlass.Constexpr,
    box: cutlass.Constexpr,
    sums: cute.Tensor,
    products: cute.Tensor,
    scales: Int32,
    lane: Int32,
) -> None:
    """Adds the products of a box to its sums, times the scales of pairs and weights."""
    of_weights = load_float(scales + (v.pairs + box) * 4)
    for j in cutlass.range_constexpr(size // 8):
        even, odd = load_floats(scales + lane % 4 * 8 + 32 * j)
        even *= of_weights
        odd *= of_weights
        for h in cutlass.range_constexpr(2):
            at = cutlass.const_expr(4 * j + 2 * h)
            sums[at] = sums[at] + products[at] * even
            sums[at + 1] = sums[at + 1] + products[at + 1] * odd
