"""The producer warp of a latent decode of 64 rows: queries, and pairs of tiles into two stages, by TMA.

Groups of blocks are loaded in the order in which they become free (see mla_many_rows). In a pair of CTAs each loads
every other block into both.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32
from cutlass.cute.nvgpu import cpasync

from dist_infer.kernels.cute.mla_shared_tiles import NUM_ROWS, block_order, group_of
from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_BLOCKS, TILE, WIDTH, Task, box_place, num_tiles

_BOTH = Int16(3)


@cute.jit
def load_pairs(
    pair: cutlass.Constexpr,
    k_tma: cute.CopyAtom,
    k_coords: cute.Tensor,
    q_tma: cute.CopyAtom,
    q_coords: cute.Tensor,
    boxes: cute.Tensor,
    query_box: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    page_size: cutlass.Constexpr,
    known: Int32,
    later: Int32,
    kv_len: Int32,
    task: Task,
) -> None:
    """See mla_load.load_tiles."""
    lane = cute.arch.lane_idx()
    box = cutlass.const_expr(cute.size(boxes, mode=[0]))
    boxes_of_tile = cutlass.const_expr(TILE // box)
    cache_boxes = cute.local_tile(k_coords, (box, BLOCK, 1), (None, 0, None))
    k_to, k_from = cpasync.tma_partition(
        k_tma, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(cache_boxes, 0, 3)
    )
    phase0, phase1, q_phase = Int32(1), Int32(1), Int32(1)  # the phase before the first counts as done
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        if first != task.first:
            kv_len = task.kv_lens[seq]
        tiles = num_tiles(kv_len)
        tile = first - before
        stop = cutlass.min(task.end - before, tiles)
        base = tile * boxes_of_tile
        if first != task.first:
            known = box_place(task, seq, kv_len, base + lane, box, page_size)
            later = box_place(task, seq, kv_len, base + 32 + lane, box, page_size)
        cute.arch.mbarrier_wait(q_empty, q_phase)
        q_phase ^= 1
        own_rows = cute.domain_offset((seq * task.rows + task.row_tile * NUM_ROWS, 0, 0), q_coords)
        own_box = cute.local_tile(own_rows, (NUM_ROWS, BLOCK, NUM_BLOCKS), (0, 0, 0))
        q_to, q_from = cpasync.tma_partition(
            q_tma, 0, cute.make_layout(1), cute.group_modes(query_box, 0, 3), cute.group_modes(own_box, 0, 3)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, NUM_ROWS * WIDTH * 2)
        cute.copy(q_tma, q_from, q_to, tma_bar_ptr=q_full)
        while tile < stop:
            box_idx = tile * boxes_of_tile - base
            if box_idx >= 32:
                base += 32
                box_idx -= 32
                known = later
                later = box_place(task, seq, kv_len, base + 32 + lane, box, page_size)
            _load_stage(pair, 0, k_tma, k_to, k_from, full, empty, phase0, known, box_idx, task)
            phase0 ^= 1
            if tile + 1 < stop:  # in the same 32 boxes, an even number of tiles
                _load_stage(pair, 1, k_tma, k_to, k_from, full, empty, phase1, known, box_idx + boxes_of_tile, task)
                phase1 ^= 1
            tile += 2
        first = before + stop
        before += tiles
        seq += 1


@cute.jit
def _load_stage(
    pair: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    k_tma: cute.CopyAtom,
    k_to: cute.Tensor,
    k_from: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    phase: Int32,
    known: Int32,
    box_idx: Int32,
    task: Task,
) -> None:
    boxes_of_tile = cutlass.const_expr(cute.size(k_to, mode=[1]))
    places = cute.make_rmem_tensor(cute.make_layout(boxes_of_tile), Int32)
    for segment in cutlass.range_constexpr(boxes_of_tile):
        places[segment] = cute.arch.shuffle_sync(known, box_idx + segment)
    for order in cutlass.range_constexpr(NUM_BLOCKS):
        block = cutlass.const_expr(block_order(stage)[order])
        slot = cutlass.const_expr(stage * NUM_BLOCKS + block)
        group = cutlass.const_expr(group_of(stage, order))
        if cutlass.const_expr(order == 0 or group != group_of(stage, order - 1)):
            cute.arch.mbarrier_wait(empty + group, phase)
        if cutlass.const_expr(pair):
            if task.row_tile % 2 == (block + stage) % 2:
                for segment in cutlass.range_constexpr(boxes_of_tile):
                    cute.copy(
                        k_tma,
                        k_from[(None, places[segment], block)],
                        k_to[(None, segment, slot)],
                        tma_bar_ptr=full + slot,
                        mcast_mask=_BOTH,
                    )
        else:
            for segment in cutlass.range_constexpr(boxes_of_tile):
                cute.copy(
                    k_tma,
                    k_from[(None, places[segment], block)],
                    k_to[(None, segment, slot)],
                    tma_bar_ptr=full + slot,
                )
