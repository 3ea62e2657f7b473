"""The first product of a decode over a cache of E4M3: the matrix units read keys and queries as bytes in shared memory.

A row of queries times a power of two is the sum of two E4M3: 4 bits and the next 4, so that no bit of bfloat16 is lost
but for what is below 2^-17 of the row's largest number. What these units add they cut 13 bits behind the largest
number: so a sum has the dims of one slot, small parts first, and slots are added in float32. The tests hold logarithms
of sums of weights to twice what such a cut costs scores in float64, results to twice their own rounding to bfloat16.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.mla_operands import SLOT_BLOCKS
from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_BLOCKS

_STEPS = BLOCK // 32
_WORDS = BLOCK // 2  # of 32 bits, in a row of both parts of a block
_PAIR_BARRIER = 3
_EXPONENT = 7  # of a row's largest number
_INFINITE = 0x7F80
# Two scaled numbers as E4M3 in the lower half, what is left of them in the upper one.
_SPLIT = """{
    .reg .b32 l, h, back;
    .reg .f32 a, b, s, x, y;
    .reg .b16 big, small, p, q;
    shl.b32 l, {$r0}, 16;
    and.b32 h, {$r0}, 0xFFFF0000;
    mov.b32 a, l;
    mov.b32 b, h;
    mov.b32 s, {$r1};
    mul.f32 a, a, s;
    mul.f32 b, b, s;
    cvt.rn.satfinite.e4m3x2.f32 big, b, a;
    cvt.rn.f16x2.e4m3x2 back, big;
    mov.b32 {p, q}, back;
    cvt.f32.f16 x, p;
    cvt.f32.f16 y, q;
    sub.f32 a, a, x;
    sub.f32 b, b, y;
    cvt.rn.satfinite.e4m3x2.f32 small, b, a;
    mov.b32 {$w0}, {big, small};
}"""


def score_mma(left_rows, right_rows):
    """Rows of E4M3 by rows of E4M3, 32 dims a step."""
    op = warpgroup.MmaF8Op(
        Float8E4M3FN,
        Float8E4M3FN,
        Float32,
        (left_rows, right_rows, 32),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


@cute.jit
def multiply_slot(
    keys_left: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    mma: cute.TiledMma,
    scores: cute.Tensor,
    f_k: cute.Tensor,
    f_q: cute.Tensor,
    slot: Int32,
    place: cutlass.Constexpr,
) -> None:
    """A group of products: `scores` of the dims of a slot, the tile's first, second or third."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for large in cutlass.range_constexpr(parts):
        for block in cutlass.range_constexpr(SLOT_BLOCKS):
            for k in cutlass.range_constexpr(_STEPS):
                step = cutlass.const_expr((parts - 1 - large) * _STEPS + k)
                left = f_k[(None, None, k, slot * SLOT_BLOCKS + block)]
                right = f_q[(None, None, step, place * SLOT_BLOCKS + block)]
                if cutlass.const_expr(not keys_left):
                    left, right = right, left
                cute.gemm(mma, scores, left, right, scores)
                mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def split_queries(num_rows: cutlass.Constexpr, words: cute.Tensor, scales: cute.Tensor) -> None:
    """Rows of bfloat16 become two E4M3 a number in their place: of each block 64 large parts, then 64 small ones.

    A warp takes every eighth row, a lane the same pair of dims of each block. `scales` is what the scores of a row are
    to be multiplied by: NaN where a number is infinite.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32 - 4)
    lane = thread % 32
    odd = lane % 2
    own = cute.make_rmem_tensor(cute.make_layout(NUM_BLOCKS), Int32)
    for turn in cutlass.range(num_rows // 8, unroll=2):
        row = turn * 8 + warp
        largest = Int32(0)
        for block in cutlass.range_constexpr(NUM_BLOCKS):
            own[block] = words[_word_at(num_rows, row, block, lane)]
            largest = cutlass.max(largest, cutlass.max(own[block] & 0x7FFF, (own[block] >> 16) & 0x7FFF))
        largest = cute.arch.warp_redux_sync(largest, "max")
        power = cutlass.min(254 + _EXPONENT - (largest >> 7), Int32(253))  # with the exponent's bias
        cute.arch.sync_warp()
        for block in cutlass.range_constexpr(NUM_BLOCKS):
            both = cute.arch.inline_ptx(_SPLIT, write_only_types=[Int32], read_only_args=[own[block], power << 23])
            # of two lanes the even one writes both large parts, the odd one both small parts
            given, kept = both >> 16, both & 0xFFFF
            if odd == 1:
                given, kept = kept, both >> 16
            taken = cute.arch.shuffle_sync_bfly(given, 1) & 0xFFFF
            word = kept & 0xFFFF | taken << 16
            if odd == 1:
                word = taken | kept << 16
            words[_word_at(num_rows, row, block, odd * (_WORDS // 2) + lane // 2)] = word
        if lane == 0:
            scale = ((254 - power) << 23).bitcast(Float32)
            if largest >= _INFINITE:
                scale = Float32(float("nan"))
            scales[row] = scale
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)


@cute.jit
def _word_at(num_rows: cutlass.Constexpr, row: Int32, block: cutlass.Constexpr, word: Int32) -> Int32:
    """Where a word of a swizzled block of rows of 128 bytes stands."""
    return (block * num_rows + row) * _WORDS + ((word // 4) ^ (row % 8)) * 4 + word % 4
