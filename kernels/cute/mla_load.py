"""The producer warps of a latent decode: queries and tiles of the cache into shared memory by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_BLOCKS, TILE, WIDTH, Task, box_place, num_tiles, tiles_of


@cute.jit
def load_first_queries(
    q_tma: cute.CopyAtom, q_coords: cute.Tensor, query_box: cute.Tensor, q_full: cute.Pointer, task: Task
) -> None:
    """Before any tile, or they would come after all that the ring has room for."""
    if task.first < task.end:
        _load_query(q_tma, q_coords, query_box, q_full, task.seq, task)


@cute.jit
def load_queries(
    q_tma: cute.CopyAtom,
    q_coords: cute.Tensor,
    query_box: cute.Tensor,
    q_full: cute.Pointer,
    q_empty: cute.Pointer,
    task: Task,
) -> None:
    """Each later sequence's queries, once the consumers are done with those before."""
    phase = Int32(1)  # the phase before the first counts as done
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        if first != task.first:
            cute.arch.mbarrier_wait(q_empty, phase)
            _load_query(q_tma, q_coords, query_box, q_full, seq, task)
        phase ^= 1
        before += tiles_of(task.kv_lens, seq)
        first = before
        seq += 1


@cute.jit
def _load_query(
    q_tma: cute.CopyAtom, q_coords: cute.Tensor, query_box: cute.Tensor, q_full: cute.Pointer, seq: Int32, task: Task
) -> None:
    num_rows = cutlass.const_expr(cute.size(query_box, mode=[0]))
    own_rows = cute.domain_offset((seq * task.rows + task.row_tile * num_rows, 0, 0), q_coords)
    own_box = cute.local_tile(own_rows, (num_rows, BLOCK, NUM_BLOCKS), (0, 0, 0))
    q_to, q_from = cpasync.tma_partition(
        q_tma, 0, cute.make_layout(1), cute.group_modes(query_box, 0, 3), cute.group_modes(own_box, 0, 3)
    )
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(q_full, num_rows * WIDTH * 2)
    cute.copy(q_tma, q_from, q_to, tma_bar_ptr=q_full)


@cute.jit
def load_tiles(
    k_tma: cute.CopyAtom,
    k_coords: cute.Tensor,
    boxes: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    page_size: cutlass.Constexpr,
    slot_blocks: cutlass.Constexpr,
    slots_of_tile: cutlass.Constexpr,
    num_slots: cutlass.Constexpr,
    known: Int32,
    later: Int32,
    kv_len: Int32,
    task: Task,
) -> None:
    """Tiles, as slots of a ring become free. Lane i knows boxes i and i + 32 of 64.

    The first ones are its arguments, as the length of the first sequence is: nothing is asked before the first load.
    """
    lane = cute.arch.lane_idx()
    box = cutlass.const_expr(cute.size(boxes, mode=[0]))
    boxes_of_tile = cutlass.const_expr(TILE // box)
    box_blocks = cutlass.const_expr(cute.size(boxes, mode=[2]))
    columns = cutlass.const_expr(cute.size(boxes, mode=[1]))
    cache_boxes = cute.local_tile(k_coords, (box, columns, box_blocks), (None, 0, None))
    k_to, k_from = cpasync.tma_partition(
        k_tma, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(cache_boxes, 0, 3)
    )
    places = cute.make_rmem_tensor(cute.make_layout(boxes_of_tile), Int32)
    slot = Int32(0)
    phase = Int32(1)  # the phase before the first counts as done
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        if first != task.first:
            kv_len = task.kv_lens[seq]
        tiles = num_tiles(kv_len)
        tile = first - before
        stop = cutlass.min(task.end - before, tiles)
        box_idx = tile * boxes_of_tile
        base = box_idx
        if first != task.first:
            known = box_place(task, seq, kv_len, base + lane, box, page_size)
            later = box_place(task, seq, kv_len, base + 32 + lane, box, page_size)
        while tile < stop:
            for segment in cutlass.range_constexpr(boxes_of_tile):
                if box_idx - base == 32:
                    base = box_idx
                    known = later
                    later = box_place(task, seq, kv_len, base + 32 + lane, box, page_size)
                places[segment] = cute.arch.shuffle_sync(known, box_idx - base)
                box_idx += 1
            for part in cutlass.range_constexpr(slots_of_tile):
                cute.arch.mbarrier_wait(empty + slot, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + slot, slot_blocks * TILE * columns * 2)
                for idx in cutlass.range_constexpr(slot_blocks // box_blocks):
                    for segment in cutlass.range_constexpr(boxes_of_tile):
                        source = k_from[(None, places[segment], part * (slot_blocks // box_blocks) + idx)]
                        target = k_to[(None, segment, slot * (slot_blocks // box_blocks) + idx)]
                        cute.copy(k_tma, source, target, tma_bar_ptr=full + slot)
                slot += 1
                if slot == num_slots:
                    slot = Int32(0)
                    phase ^= 1
            tile += 1
        first = before + stop
        before += tiles
        seq += 1
