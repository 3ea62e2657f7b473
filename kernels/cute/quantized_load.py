"""The warpgroup of a grouped product with quantised weights that loads: weights by TMA, rows and scales by threads."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from dist_infer.kernels.cute.grouped_gemm_parts import STEP, from_lane
from dist_infer.kernels.cute.moe_copies import arrive_when_copied, copy_async
from dist_infer.kernels.cute.moe_schedule import look_up, tile_of
from dist_infer.kernels.cute.quantized_parts import ROW_BYTES, copy_bytes, slot_after

_EVICT_FIRST = 0x12F0000000000000  # policy of the L2 cache


@cute.jit
def load(
    v: cutlass.Constexpr,
    w_tma: cute.CopyAtom,
    w_coords: cute.Tensor,
    weights: cute.Tensor,
    row_tiles: cute.Pointer,
    scale_tiles: cute.Pointer,
    rows: cute.Tensor,
    row_scales: Any,
    weight_scales: cute.Tensor,
    order: cute.Tensor,
    tables: tuple[cute.Tensor, ...],
    full: cute.Pointer,
    empty: cute.Pointer,
    top_k: Int32,
    channel_blocks: Int32,
    second_box: Int32,
    expert_rows: Int32,
    num_tiles: Int32,
    depth: Int32,
) -> None:
    """8 threads copy 128 bytes of a row, 16 rows at a time; each thread the scales of a pair or of rows of weights."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = cute.arch.lane_idx()
    chunk, first_row = thread % 8, thread // 8
    row_bytes = depth * (v.pieces * ROW_BYTES)
    source0 = rows.iterator.toint() + Int64(chunk * 16)
    target0 = row_tiles.toint() + first_row * ROW_BYTES + (chunk ^ (first_row % 8)) * 16
    num_rows = cutlass.const_expr(v.pairs // STEP + v.scales_of_thread)
    own_rows = cute.make_rmem_tensor(cute.make_layout(num_rows), Int32)
    next_rows = cute.make_rmem_tensor(cute.make_layout(num_rows), Int32)
    stage, phase, slot = Int32(0), Int32(1), Int32(0)  # the phase before the first counts as done
    known = look_up(tables, lane, num_tiles, channel_blocks, v.pairs)
    expert, block, first, count, _ = from_lane(known, Int32(0))
    _find_rows(v, order, next_rows, first, count, thread)
    turn = Int32(0)
    while tile_of(turn) < num_tiles:
        for step in cutlass.range_constexpr(num_rows):
            own_rows[step] = next_rows[step] // top_k
        own_count = count
        first_weight = expert * expert_rows + block * (v.box if v.gate_up else 2 * v.box)
        # behind the last expert's rows there is nothing to read, and no channel of the output
        boxes = (first_weight, cutlass.min(first_weight + second_box, cute.size(w_coords, mode=[0]) - v.box))
        turn += 1
        if turn % 32 == 0:
            known = look_up(tables, turn + lane, num_tiles, channel_blocks, v.pairs)
        expert, block, first, count, _ = from_lane(known, turn % 32)
        _find_rows(v, order, next_rows, first, count, thread)  # they are there when this tile is loaded
        w_to, w_first = _weight_boxes(v, w_tma, w_coords, weights, boxes[0])
        _, w_second = _weight_boxes(v, w_tma, w_coords, weights, boxes[1])
        early = Int32(0)
        if turn == 1:  # the weights of the first stages, while the launch before still works on the rows
            while early < cutlass.min(depth, v.num_stages):
                if warp == 0:
                    _copy_weights(v, w_tma, w_to, w_first, w_second, full, early, early)
                early += 1
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        source = source0
        k = Int32(0)
        while k < depth:
            if k >= early:
                cute.arch.mbarrier_wait(empty + stage, phase)
                if warp == 0:
                    _copy_weights(v, w_tma, w_to, w_first, w_second, full, stage, k)
            target = target0 + stage * (v.pieces * v.pairs * ROW_BYTES)
            for step in cutlass.range_constexpr(v.pairs // STEP):
                if step * STEP + first_row < own_count:  # what other rows have shows in no pair's sums
                    from_row = source + Int64(own_rows[step]) * row_bytes
                    for piece in cutlass.range_constexpr(v.pieces):
                        to = target + (piece * v.pairs + step * STEP) * ROW_BYTES
                        copy_async(to, from_row + piece * ROW_BYTES)
            scales = scale_tiles.toint() + slot * v.slot_bytes
            if cutlass.const_expr(v.is_fp8):
                _copy_block_scales(v, scales, row_scales, weight_scales, own_rows, own_count, boxes, depth, k, thread)
            elif k % v.scale_stages == 0:
                _copy_row_scales(v, scales, weight_scales, boxes, depth, k, thread)
            arrive_when_copied(full + stage)
            source += v.pieces * ROW_BYTES
            stage += 1
            if stage == v.num_stages:
                stage = Int32(0)
                phase ^= 1
            slot = slot_after(v, slot, k)
            k += 1
    if turn == 0:
        cute.arch.griddepcontrol_wait()  # whoever waits for this launch relies on the ones before, too


@cute.jit
def _find_rows(
    v: cutlass.Constexpr,
    order: cute.Tensor,
    rows: cute.Tensor,
    first: Int32,
    count: Int32,
    thread: Int32,
) -> None:
    """The pairs of a tile that a thread copies rows of, then those whose scales."""
    for step in cutlass.range_constexpr(v.pairs // STEP + v.scales_of_thread):
        turn = cutlass.const_expr(step - v.pairs // STEP)
        pair = thread + 128 * turn if cutlass.const_expr(turn >= 0) else step * STEP + thread // 8
        rows[step] = first + pair
        if cutlass.const_expr(v.gate_up):
            rows[step] = Int32(0)
            if pair < count:
                rows[step] = Int32(order[first + pair])


@cute.jit
def _copy_block_scales(
    v: cutlass.Constexpr,
    target: Int32,
    row_scales: cute.Tensor,
    weight_scales: cute.Tensor,
    rows: cute.Tensor,
    count: Int32,
    boxes: tuple[Int32, Int32],
    depth: Int32,
    k: Int32,
    thread: Int32,
) -> None:
    """Of FP8 the scales of all pairs, and of both boxes."""
    for turn in cutlass.range_constexpr(v.scales_of_thread):
        pair = thread + 128 * turn
        if pair < count:
            place = Int64(rows[v.pairs // STEP + turn]) * depth + k
            copy_bytes(target + pair * 4, row_scales.iterator.toint() + place * 4, 4)
    for box in cutlass.range_constexpr(2):
        if thread == 127 - box:
            place = Int64(boxes[box] // 128) * depth + k
            copy_bytes(target + (v.pairs + box) * 4, weight_scales.iterator.toint() + place * 4, 4)


@cute.jit
def _copy_row_scales(
    v: cutlass.Constexpr,
    target: Int32,
    weight_scales: cute.Tensor,
    boxes: tuple[Int32, Int32],
    depth: Int32,
    k: Int32,
    thread: Int32,
) -> None:
    """The scales of the rows of weights."""
    for box in cutlass.range_constexpr(2):
        if thread < v.box:
            place = (Int64(boxes[box] + thread) * depth + k) * v.scale_bytes
            size = cutlass.const_expr(v.scale_bytes * v.scale_stages)
            to = target + (box * v.box + thread) * size
            copy_bytes(to, weight_scales.iterator.toint() + place, size)


@cute.jit
def _copy_weights(
    v: cutlass.Constexpr,
    w_tma: cute.CopyAtom,
    w_to: cute.Tensor,
    w_first: cute.Tensor,
    w_second: cute.Tensor,
    full: cute.Pointer,
    stage: Int32,
    k: Int32,
) -> None:
    """One warp asks for both boxes of a stage."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * v.box * v.weight_bytes)
    _copy_box(v, w_tma, w_first[(None, k)], w_to[(None, 2 * stage)], full + stage)
    _copy_box(v, w_tma, w_second[(None, k)], w_to[(None, 2 * stage + 1)], full + stage)


def _copy_box(v, w_tma, source, target, barrier):
    options = {"cache_policy": Int64(_EVICT_FIRST)} if v.streams else {}
    cute.copy(w_tma, source, target, tma_bar_ptr=barrier, **options)


@cute.jit
def _weight_boxes(
    v: cutlass.Constexpr, w_tma: cute.CopyAtom, w_coords: cute.Tensor, weights: cute.Tensor, first_row: Int32
):
    """(where boxes go, where they come from) for rows of weights from `first_row`."""
    own = cute.local_tile(cute.domain_offset((first_row, 0), w_coords), (v.box, v.weight_bytes), (0, None))
    return cpasync.tma_partition(
        w_tma, 0, cute.make_layout(1), cute.group_modes(weights, 0, 2), cute.group_modes(own, 0, 2)
    )
