"""The parts of a sequence that several CTAs worked on: how they are written and taken.

All words of a part are EMPTY until it is written, values and logarithms alike. So whoever merges parts (see mla_merge)
loads their words until none is EMPTY, which takes no fence and no flag, and leaves them EMPTY for the next launch. Each
word has one reader.

A part is made of units of 128 values, four a lane, and the logarithms of their rows. They are either a fourth of a row
each, or 16 dims of 8 rows as a warp has them in fragments of a transposed product: then a lane's four are of two rows
and of dims 8 apart, or `adjacent` where the product took dims in pairs (see mla_operands).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dist_infer.kernels.cute.mla_clerk import MAX_CTAS, NUM_STATES
from dist_infer.kernels.cute.mla_softmax import NOTHING
from dist_infer.kernels.cute.mla_tiles import LATENT, Task, part_slot

EMPTY = -1  # as a float a NaN that arithmetic does not give
UNIT = 128
UNITS_OF_ROW = LATENT // UNIT
ROWS_OF_FRAGMENT = 8
_FETCH = f"""{{
    .reg .pred lacks;
    .reg .b32 a, b, c, d, s, t;
    mov.b32 a, {{$r0}};
    mov.b32 b, {{$r1}};
    mov.b32 c, {{$r2}};
    mov.b32 d, {{$r3}};
    mov.b32 s, {{$r4}};
    mov.b32 t, {{$r5}};
    setp.eq.s32 lacks, a, {EMPTY};
    setp.eq.or.s32 lacks, b, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, c, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, d, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, s, {EMPTY}, lacks;
    setp.eq.or.s32 lacks, t, {EMPTY}, lacks;
    @lacks ld.relaxed.gpu.global.v4.b32 {{a, b, c, d}}, [{{$r6}}];
    @lacks ld.relaxed.gpu.global.v2.b32 {{s, t}}, [{{$r7}}];
    mov.b32 {{$w0}}, a;
    mov.b32 {{$w1}}, b;
    mov.b32 {{$w2}}, c;
    mov.b32 {{$w3}}, d;
    mov.b32 {{$w4}}, s;
    mov.b32 {{$w5}}, t;
}}"""
_CLEAR_FOUR = "st.global.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};"
_CLEAR_TWO = "st.global.v2.b32 [{$r0}], {{$r1}, {$r1}};"


def workspace_size(rows: int, num_ctas: int) -> int:
    """In 32-bit words, for parts of up to so many rows. The first NUM_STATES are 0 between launches, others EMPTY."""
    return NUM_STATES + 2 * num_ctas * rows * UNITS_OF_ROW * (UNIT + ROWS_OF_FRAGMENT)


@cute.jit
def parts_in(workspace: Int64, rows: cutlass.Constexpr, in_fragments: cutlass.Constexpr, num_ctas: Int32):
    """(values [part, unit, 128], logarithms [part, unit, 8 or 2], states [state or given up, CTA]) at an address.

    Of a fourth of a row there are two equal ones.
    """
    units = cutlass.const_expr(rows * UNITS_OF_ROW)
    scores = cutlass.const_expr(ROWS_OF_FRAGMENT if in_fragments else 2)
    lse = workspace + 4 * NUM_STATES
    out = lse + num_ctas * (8 * units * scores)
    return (
        cute.make_tensor(
            cute.make_ptr(Float32, out, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((2 * num_ctas, units, UNIT), stride=(units * UNIT, UNIT, 1)),
        ),
        cute.make_tensor(
            cute.make_ptr(Float32, lse, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((2 * num_ctas, units, scores), stride=(units * scores, scores, 1)),
        ),
        cute.make_tensor(
            cute.make_ptr(Int32, workspace, cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout((2, MAX_CTAS), stride=(MAX_CTAS, 1)),
        ),
    )


@cute.jit
def rows_of_part(task: Task, slot: Int32) -> cute.Tensor:
    """Its values [row, dim], where units are fourths of rows. Those of rows that the call has not stay as they are."""
    rows = cutlass.const_expr(task.part_out.shape[1] // UNITS_OF_ROW)
    layout = cute.make_layout((rows, LATENT), stride=(LATENT, 1))
    return cute.make_tensor(task.part_out[slot, None, None].iterator, layout)


@cute.jit
def leave_score(task: Task, slot: Int32, row: Int32, score: Float32) -> None:
    """The logarithm of a row, where units are fourths of rows."""
    two = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    two.fill(score)
    for idx in cutlass.range_constexpr(UNITS_OF_ROW):
        task.part_lse[slot, row * UNITS_OF_ROW + idx, None].store(two.load())


@cute.jit
def leave_fragments(
    num_rows: cutlass.Constexpr, task: Task, halves, scores: cute.Tensor, slot: Int32, first_unit: Int32, lane: Int32
) -> None:
    """A warp's units of a part, 16 dims of 8 rows each: lane i's quad, and two logarithms of lanes 0 .. 3."""
    two = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for block in cutlass.range_constexpr(len(halves)):
        for j in cutlass.range_constexpr(num_rows // 8):
            unit = first_unit + (block * (num_rows // 2) + j)
            cute.local_tile(task.part_out[slot, unit, None], (4,), (lane,)).store(
                quad_of(halves[block], num_rows, j).load()
            )
            two[0], two[1] = scores[2 * j], scores[2 * j + 1]
            if lane < 4:
                cute.local_tile(task.part_lse[slot, unit, None], (2,), (lane,)).store(two.load())


def quad_of(fragment, num_rows, j):
    return cute.make_tensor(fragment.iterator, cute.make_layout((4, num_rows // 8)))[None, j]


@cute.jit
def collect(
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    words: cute.Tensor,
    task: Task,
    worker: Int32,
    part: Int32,
    step: Int32,
    count: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
) -> None:
    """Words [4 of values and 2 of logarithms, part, unit] of parts part + p * step, once they are written."""
    for i in cutlass.range_constexpr(num_units):
        for p in cutlass.range_constexpr(num_parts):
            fill, score = Int32(0), Float32(NOTHING).bitcast(Int32)
            if part + p * step < count and unit + i * stride < units:
                fill, score = Int32(EMPTY), Int32(EMPTY)
            for idx in cutlass.range_constexpr(6):
                words[idx, p, i] = fill if cutlass.const_expr(idx < 4) else score
    lacking = Int32(1)
    while lacking > 0:
        for i in cutlass.range_constexpr(num_units):
            for p in cutlass.range_constexpr(num_parts):
                values_at, scores_at = _places(task, worker, part + p * step, unit + i * stride)
                new = cute.arch.inline_ptx(
                    _FETCH,
                    write_only_types=[Int32] * 6,
                    read_only_args=[*(words[idx, p, i] for idx in range(6)), values_at, scores_at],
                )
                for idx in cutlass.range_constexpr(6):
                    words[idx, p, i] = new[idx]
        lacks = words[0, 0, 0] == EMPTY
        for i in cutlass.range_constexpr(num_units):
            for p in cutlass.range_constexpr(num_parts):
                for idx in cutlass.range_constexpr(6):
                    lacks = lacks or words[idx, p, i] == EMPTY
        lacking = Int32(0)
        if cute.arch.vote_any_sync(lacks):
            lacking = Int32(1)


@cute.jit
def clear(
    num_units: cutlass.Constexpr,
    num_parts: cutlass.Constexpr,
    task: Task,
    worker: Int32,
    part: Int32,
    step: Int32,
    count: Int32,
    unit: Int32,
    stride: Int32,
    units: Int32,
) -> None:
    """What was collected is EMPTY again."""
    for i in cutlass.range_constexpr(num_units):
        for p in cutlass.range_constexpr(num_parts):
            if part + p * step < count and unit + i * stride < units:
                values_at, scores_at = _places(task, worker, part + p * step, unit + i * stride)
                cute.arch.inline_ptx(_CLEAR_FOUR, read_only_args=[values_at, Int32(EMPTY)])
                if cute.arch.lane_idx() < cutlass.const_expr(task.part_lse.shape[2] // 2):
                    cute.arch.inline_ptx(_CLEAR_TWO, read_only_args=[scores_at, Int32(EMPTY)])


@cute.jit
def _places(task: Task, worker: Int32, part: Int32, unit: Int32):
    """Addresses of a lane's four values and of its two logarithms."""
    starts = Int32(0)
    if part == 0:
        starts = Int32(1)
    units, scores = cutlass.const_expr(task.part_lse.shape[1]), cutlass.const_expr(task.part_lse.shape[2])
    idx = part_slot(worker + part, task.row_tiles, task.row_tile, starts) * units + unit
    lane = cute.arch.lane_idx()
    values_at = task.part_out.iterator.toint() + (idx * (4 * UNIT) + lane * 16)
    return values_at, task.part_lse.iterator.toint() + (idx * (4 * scores) + lane % (scores // 2) * 8)


def in_fragments(task):
    return task.part_lse.shape[2] == ROWS_OF_FRAGMENT
