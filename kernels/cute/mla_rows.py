"""Sums of a warp's 16 rows go to memory in whole rows, by way of shared memory.

Stored from where the matrix units leave them, 16 or 32 bytes of 8 rows at a time, they would take several times as
long. A warp needs 8 KB, 512 bytes a row, in units of 16 bytes that are swizzled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

ROWS_OF_WARP = 16
_UNITS = 32
NUM_WARPS = 8


@cute.jit
def write_rows(
    sums: cute.Tensor,  # value i + 2 h + 4 j is of row lane // 4 + 8 h and dim 2 (lane % 4) + i + 8 j
    inverses: cute.Tensor,  # what they are multiplied by, for h
    staging: cute.Pointer,  # of the warps, side by side, to elements of the output
    warp: Int32,
    out: cute.Tensor,  # [row, dim]
    first_row: Int32,
    num_rows: Int32,
    share: Int32,  # of the output's dims: as many before as `sums` has
    lane: Int32,
) -> None:
    """Writes the first `num_rows` of the warp's rows."""
    dtype = out.element_type
    unit_size = cutlass.const_expr(128 // dtype.width)
    turn_size = cutlass.const_expr(_UNITS * unit_size)
    num_turns = cutlass.const_expr(2 * cute.size(sums) // turn_size)
    twos = cute.make_tensor(staging, cute.make_layout((2, ROWS_OF_WARP * turn_size // 2, NUM_WARPS)))
    units = cute.make_tensor(staging, cute.make_layout((unit_size, ROWS_OF_WARP * _UNITS, NUM_WARPS)))
    values = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    row, two = lane // 4, lane % 4
    for turn in cutlass.range_constexpr(num_turns):
        cute.arch.sync_warp()
        for j in cutlass.range_constexpr(turn_size // 8):
            for h in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    values[i] = sums[i + 2 * h + 4 * (j + turn * (turn_size // 8))] * inverses[h]
                column = 4 * j + two  # in pairs
                unit = (column // (unit_size // 2)) ^ row
                place = ((row + 8 * h) * _UNITS + unit) * (unit_size // 2) + column % (unit_size // 2)
                twos[None, place, warp].store(values.load().to(dtype))
        cute.arch.sync_warp()
        for idx in cutlass.range(num_rows, unroll=8):
            taken = units[None, idx * _UNITS + (lane ^ (idx % 8)), warp].load()
            to = cute.local_tile(
                out[first_row + idx, None], (unit_size,), ((share * num_turns + turn) * _UNITS + lane,)
            )
            to.store(taken)
