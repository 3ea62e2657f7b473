"""The parts of a sequence that several CTAs worked on become one."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dist_infer.kernels.cute.mla_softmax import NOTHING, exp2, finite, normalise
from dist_infer.kernels.cute.mla_tiles import LATENT, part_slot

NUM_WARPS = 16
FEW_PARTS = 16
_UNIT = 128  # dims of a row that a warp merges, 4 a lane
_UNITS_OF_ROW = LATENT // _UNIT


@cute.jit
def merge_parts(
    part_out: cute.Tensor,
    part_lse: cute.Tensor,
    parts: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    rows: Int32,
    row_tiles: Int32,
) -> None:
    """The CTAs [x, sequence] of the merge; a sequence in one part has been written already.

    Up to 16 parts: a warp merges a unit, lane p knows the weight of part p. More: the warps of a CTA share the parts.
    """
    block, seq, _ = cute.arch.block_idx()
    num_blocks, _, _ = cute.arch.grid_dim()
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    warp = cute.arch.make_warp_uniform(thread // 32)
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(Float32, cute.make_layout((_UNIT, NUM_WARPS)), byte_alignment=16)
    weights = smem.allocate_tensor(Float32, cute.make_layout(NUM_WARPS), byte_alignment=16)
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
    first, count = parts[seq, 0], parts[seq, 1]
    if count > 1 and count <= FEW_PARTS:
        unit = block * NUM_WARPS + warp
        while unit < rows * _UNITS_OF_ROW:
            _merge_by_warp(part_out, part_lse, out, lse, first, count, seq, rows, row_tiles, unit, lane)
            unit += num_blocks * NUM_WARPS
    if count > FEW_PARTS:
        unit = block
        while unit < rows * _UNITS_OF_ROW:
            _merge_by_cta(
                part_out, part_lse, out, lse, sums, weights, first, count, seq, rows, row_tiles, unit, lane, warp
            )
            unit += num_blocks


@cute.jit
def _merge_by_warp(
    part_out: cute.Tensor,
    part_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    first: Int32,
    count: Int32,
    seq: Int32,
    rows: Int32,
    row_tiles: Int32,
    unit: Int32,
    lane: Int32,
) -> None:
    row = unit // _UNITS_OF_ROW
    tile_rows = cutlass.const_expr(part_lse.shape[1])
    column, row_tile = row % tile_rows, row // tile_rows
    score = Float32(NOTHING)
    if lane < count:
        score = part_lse[_slot(first, lane, row_tiles, row_tile), column]
    reference = finite(cute.arch.warp_reduction(score, lambda x, y: cute.arch.fmax(x, y)))
    weight = exp2(score - reference)
    total = cute.arch.warp_reduction(weight, lambda x, y: x + y)
    values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    values.fill(0.0)
    for part in cutlass.range(count, unroll=4):
        loaded = _load(part_out, _slot(first, part, row_tiles, row_tile), column, unit, lane)
        own = cute.arch.shuffle_sync(weight, part)
        for idx in cutlass.range_constexpr(4):
            values[idx] += own * loaded[idx]
    inverse, merged = normalise(total, reference)
    for idx in cutlass.range_constexpr(4):
        dim = unit % _UNITS_OF_ROW * _UNIT + lane * 4 + idx
        out[seq * rows + row, dim] = (values[idx] * inverse).to(out.element_type)
    if lane == 0 and unit % _UNITS_OF_ROW == 0:
        lse[seq * rows + row] = merged


@cute.jit
def _merge_by_cta(
    part_out: cute.Tensor,
    part_lse: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    sums: cute.Tensor,
    weights: cute.Tensor,
    first: Int32,
    count: Int32,
    seq: Int32,
    rows: Int32,
    row_tiles: Int32,
    unit: Int32,
    lane: Int32,
    warp: Int32,
) -> None:
    row = unit // _UNITS_OF_ROW
    tile_rows = cutlass.const_expr(part_lse.shape[1])
    column, row_tile = row % tile_rows, row // tile_rows
    largest = Float32(NOTHING)
    part = lane
    while part < count:
        largest = cute.arch.fmax(largest, part_lse[_slot(first, part, row_tiles, row_tile), column])
        part += 32
    reference = finite(cute.arch.warp_reduction(largest, lambda x, y: cute.arch.fmax(x, y)))
    values = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    values.fill(0.0)
    weight_sum = Float32(0.0)
    for turn in cutlass.range((count + NUM_WARPS - 1 - warp) // NUM_WARPS, unroll=8):
        slot = _slot(first, warp + NUM_WARPS * turn, row_tiles, row_tile)
        weight = exp2(part_lse[slot, column] - reference)
        weight_sum += weight
        loaded = _load(part_out, slot, column, unit, lane)
        for idx in cutlass.range_constexpr(4):
            values[idx] += weight * loaded[idx]
    for idx in cutlass.range_constexpr(4):
        sums[lane * 4 + idx, warp] = values[idx]
    if lane == 0:
        weights[warp] = weight_sum
    cute.arch.sync_threads()
    thread = warp * 32 + lane
    if thread < _UNIT:
        total = Float32(0.0)
        value = Float32(0.0)
        for other in cutlass.range_constexpr(NUM_WARPS):
            total += weights[other]
            value += sums[thread, other]
        inverse, merged = normalise(total, reference)
        dim = unit % _UNITS_OF_ROW * _UNIT + thread
        out[seq * rows + row, dim] = (value * inverse).to(out.element_type)
        if thread == 0 and unit % _UNITS_OF_ROW == 0:
            lse[seq * rows + row] = merged
    cute.arch.sync_threads()


@cute.jit
def _slot(first: Int32, part: Int32, row_tiles: Int32, row_tile: Int32) -> Int32:
    starts = Int32(0)
    if part == 0:
        starts = Int32(1)
    return part_slot(first + part, row_tiles, row_tile, starts)


@cute.jit
def _load(part_out: cute.Tensor, slot: Int32, column: Int32, unit: Int32, lane: Int32):
    quad = unit % _UNITS_OF_ROW * (_UNIT // 4) + lane
    return cute.local_tile(part_out[slot, column, None], (4,), (quad,)).load()
