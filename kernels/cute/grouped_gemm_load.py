"""The warps of a grouped product that load: weights by TMA, and rows gathered or by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from dist_infer.kernels.cute.grouped_gemm_parts import DEPTH, STEP, from_lane
from dist_infer.kernels.cute.moe_copies import arrive_when_copied, copy_async
from dist_infer.kernels.cute.moe_schedule import look_up_in_cluster, tile_of


@cute.jit
def load_gathered(
    v: cutlass.Constexpr,
    w_tma: cute.CopyAtom,
    w_coords: cute.Tensor,
    weights: cute.Tensor,
    row_tiles: cute.Tensor,
    rows: cute.Tensor,
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
    """The producer warpgroup: 8 threads copy the 128 bytes of a row, 16 rows at a time."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    chunk, first_row = thread % 8, thread // 8
    row_bytes = rows.stride[0] * 2
    source0 = rows.iterator.toint() + Int64(chunk * 16)
    target0 = row_tiles.iterator.toint() + first_row * 128 + (chunk ^ (first_row % 8)) * 16
    lane = cute.arch.lane_idx()
    row_idx = cute.make_rmem_tensor(cute.make_layout(v.pairs // STEP), Int32)
    next_pairs = cute.make_rmem_tensor(cute.make_layout(v.pairs // STEP), Int32)
    stage, phase = Int32(0), Int32(1)  # the phase before the first counts as done
    known = look_up_in_cluster(tables, lane, num_tiles, channel_blocks, v.pairs, v.cluster)
    expert, block, first, count, longest, shares = from_lane(known, Int32(0))
    _read_order(v, order, next_pairs, first, count, longest, first_row)
    turn = Int32(0)
    while tile_of(turn) < num_tiles:
        for step in cutlass.range_constexpr(v.pairs // STEP):
            row_idx[step] = next_pairs[step] // top_k
        own_row, own_longest, own_shares = expert * expert_rows + block * v.box, longest, shares
        turn += 1
        if turn % 32 == 0:
            known = look_up_in_cluster(tables, turn + lane, num_tiles, channel_blocks, v.pairs, v.cluster)
        expert, block, first, count, longest, shares = from_lane(known, turn % 32)
        _read_order(v, order, next_pairs, first, count, longest, first_row)  # they are there when this tile is loaded
        w_to, w_gate = _weight_boxes(v, w_tma, w_coords, weights, own_row)
        _, w_up = _weight_boxes(v, w_tma, w_coords, weights, own_row + second_box)
        source = source0
        k = Int32(0)
        while k < depth:
            cute.arch.mbarrier_wait(empty + stage, phase)
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, v.stage_bytes)
                _load_weights(v, w_tma, w_gate, w_up, w_to, k, stage, full + stage, own_shares)
            target = target0 + stage * (v.pieces * v.pairs * DEPTH * 2)
            for step in cutlass.range_constexpr(v.pairs // STEP):
                if step * STEP < own_longest:
                    for piece in cutlass.range_constexpr(v.pieces):
                        to = target + (piece * v.pairs + step * STEP) * 128
                        copy_async(to, source + Int64(row_idx[step]) * row_bytes + piece * 128)
            arrive_when_copied(full + stage)
            source += v.pieces * 128
            stage += 1
            if stage == v.num_stages:
                stage = Int32(0)
                phase ^= 1
            k += 1


@cute.jit
def _read_order(
    v: cutlass.Constexpr,
    order: cute.Tensor,
    pairs: cute.Tensor,
    first: Int32,
    count: Int32,
    longest: Int32,
    own: Int32,
) -> None:
    """The pairs of a tile that a thread copies rows of; behind the last one that one again."""
    for step in cutlass.range_constexpr(v.pairs // STEP):
        pairs[step] = Int32(0)
        if step * STEP < longest:
            pairs[step] = Int32(order[first + cutlass.min(step * STEP + own, count - 1)])


@cute.jit
def load_in_order(
    v: cutlass.Constexpr,
    w_tma: cute.CopyAtom,
    w_coords: cute.Tensor,
    r_tma: cute.CopyAtom,
    r_coords: cute.Tensor,
    weights: cute.Tensor,
    boxes: cute.Tensor,
    tables: tuple[cute.Tensor, ...],
    full: cute.Pointer,
    empty: cute.Pointer,
    channel_blocks: Int32,
    second_box: Int32,
    expert_rows: Int32,
    num_tiles: Int32,
    depth: Int32,
) -> None:
    """The producer warp where rows stand in order; those behind an expert's are loaded too and not used."""
    stage, phase = Int32(0), Int32(1)
    waiting = Int32(1)
    lane = cute.arch.lane_idx()
    known = look_up_in_cluster(tables, lane, num_tiles, channel_blocks, v.pairs, v.cluster)
    turn = Int32(0)
    while tile_of(turn) < num_tiles:
        if turn % 32 == 0 and turn > 0:
            known = look_up_in_cluster(tables, turn + lane, num_tiles, channel_blocks, v.pairs, v.cluster)
        expert, block, first, _, longest, shares = from_lane(known, turn % 32)
        steps = (longest + STEP - 1) // STEP
        first_row = expert * expert_rows + block * (2 * v.box)
        w_to, w_low = _weight_boxes(v, w_tma, w_coords, weights, first_row)
        _, w_high = _weight_boxes(v, w_tma, w_coords, weights, first_row + second_box)
        own_rows = cute.local_tile(cute.domain_offset((first, 0), r_coords), (STEP, DEPTH), (None, None))
        r_to, r_from = cpasync.tma_partition(
            r_tma, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(own_rows, 0, 2)
        )
        stage_bytes = v.stage_bytes + steps * (STEP * v.pieces * DEPTH * 2)
        k = Int32(0)
        if waiting:  # the weights of the first stages, while the launch before still works on the rows
            while k < cutlass.min(depth, v.num_stages):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + k, stage_bytes)
                _load_weights(v, w_tma, w_low, w_high, w_to, k, k, full + k, shares)
                k += 1
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        early = k
        k = Int32(0)
        while k < depth:
            if k >= early:
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
                _load_weights(v, w_tma, w_low, w_high, w_to, k, stage, full + stage, shares)
            step = Int32(0)
            while step < steps:
                for piece in cutlass.range_constexpr(v.pieces):
                    of, to = v.pieces * k + piece, v.pieces * stage + piece
                    cute.copy(r_tma, r_from[(None, step, of)], r_to[(None, step, to)], tma_bar_ptr=full + stage)
                step += 1
            stage += 1
            if stage == v.num_stages:
                stage = Int32(0)
                phase ^= 1
            k += 1
        waiting = Int32(0)
        turn += 1


@cute.jit
def _load_weights(
    v: cutlass.Constexpr,
    w_tma: cute.CopyAtom,
    first: cute.Tensor,
    second: cute.Tensor,
    to: cute.Tensor,
    k: Int32,
    stage: Int32,
    barrier: cute.Pointer,
    shares: Int32,
) -> None:
    """Both boxes of a stage. CTAs that share them take turns: each loads every other stage for both."""
    if cutlass.const_expr(v.cluster == 1):
        _load_boxes(v, w_tma, first, second, to, k, stage, tma_bar_ptr=barrier)
    else:
        rank = cute.arch.block_idx_in_cluster()
        if shares == 0 or k % v.cluster == rank:
            ctas = cutlass.max(Int32(1) << rank, shares * ((1 << v.cluster) - 1))
            _load_boxes(v, w_tma, first, second, to, k, stage, tma_bar_ptr=barrier, mcast_mask=ctas.to(Int16))


def _load_boxes(v, w_tma, first, second, to, k, stage, **options):
    for which in range(2):
        box = first if which == 0 else second
        for piece in range(v.pieces):
            place = (2 * stage + which) * v.pieces + piece
            cute.copy(w_tma, box[(None, v.pieces * k + piece)], to[(None, place)], **options)


@cute.jit
def _weight_boxes(
    v: cutlass.Constexpr, w_tma: cute.CopyAtom, w_coords: cute.Tensor, weights: cute.Tensor, first_row: Int32
):
    """(where boxes go, where they come from) for rows of weights from `first_row`."""
    own = cute.local_tile(cute.domain_offset((first_row, 0), w_coords), (v.box, DEPTH), (0, None))
    return cpasync.tma_partition(
        w_tma, 0, cute.make_layout(1), cute.group_modes(weights, 0, 2), cute.group_modes(own, 0, 2)
    )
