"""Bytes of E4M3 in shared memory become operands of float16 in registers, and what is multiplied by them fits.

Loads of 8 x 8 words leave a thread with four neighbouring bytes of a token, or with two neighbouring dims of two
neighbouring tokens. So of 16 dims a step of the first product takes dims 4 t, 4 t + 1 where the instruction counts
2 t, 2 t + 1, and dims 4 t + 2, 4 t + 3 for 2 t + 8, 2 t + 9: the queries are put into that order. Rows g and g + 8 of
the second product are dims 2 g and 2 g + 1.

Queries become float16 times a power of two that brings their largest value to 2^13: what float16 loses is below 2^-38
of it. Weights are float16 too, times 2^15: those below 2^-39 of the largest one become 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_BLOCKS, TILE, Task, wrapped

WORDS = BLOCK // 2  # of 16 bits, in a row of a block
SLOT_BLOCKS = 3
SLOTS_OF_TILE = NUM_BLOCKS // SLOT_BLOCKS
ROW_BYTES = BLOCK
BLOCK_BYTES = TILE * ROW_BYTES
SLOT_BYTES = SLOT_BLOCKS * BLOCK_BYTES
STEPS = 4  # of 16, in a block
WEIGHT_BYTES = 2 * TILE  # of a query row
WEIGHT_EXPONENT = 15
_PAIR_BARRIER = 3
_QUERY_EXPONENT = 13
_LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
_LOAD_TRANSPOSED = _LOAD.replace("x4", "x4.trans")
# A token's four bytes: two for a step's columns from 2 t on, two for those from 2 t + 8 on.
_WIDEN_KEYS = """{
    .reg .b16 l, h;
    mov.b32 {l, h}, {$r0};
    cvt.rn.f16x2.e4m3x2 {$w0}, l;
    cvt.rn.f16x2.e4m3x2 {$w1}, h;
}"""
# Two tokens' pairs of dims to each dim's pair of tokens.
_WIDEN_VALUES = """{
    .reg .b32 a;
    .reg .b16 l, h;
    prmt.b32 a, {$r0}, 0, 0x3120;
    mov.b32 {l, h}, a;
    cvt.rn.f16x2.e4m3x2 {$w0}, l;
    cvt.rn.f16x2.e4m3x2 {$w1}, h;
}"""
_PACK = "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};"
_STORE_TRANSPOSED = {
    2: "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], {{$r1}, {$r2}};",
    4: "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
}
_SCALED_HALVES = """{
    .reg .b32 l, h;
    .reg .f32 a, b, s;
    shl.b32 l, {$r0}, 16;
    and.b32 h, {$r0}, 0xFFFF0000;
    mov.b32 a, l;
    mov.b32 b, h;
    mov.b32 s, {$r1};
    mul.f32 a, a, s;
    mul.f32 b, b, s;
    cvt.rn.f16x2.f32 {$w0}, b, a;
}"""


@cute.jit
def _load(ptx: cutlass.Constexpr, place: Int32, loaded: cute.Tensor, first: cutlass.Constexpr) -> None:
    """Four matrices of 8 rows of 16 bytes; the lane's row is at `place`."""
    taken = cute.arch.inline_ptx(ptx, write_only_types=[Int32] * 4, read_only_args=[place])
    for idx in cutlass.range_constexpr(4):
        loaded[first + idx] = taken[idx]


@cute.jit
def load_keys(place: Int32, row: Int32, loaded: cute.Tensor) -> None:
    """The warp's 16 tokens of the block at `place`; a lane's two rows of 16 bytes are 32 apart, either way."""
    _load(_LOAD, place + row, loaded, 0)
    _load(_LOAD, place + (row ^ 32), loaded, 4)


@cute.jit
def load_values(
    turn: cutlass.Constexpr, base: Int32, slot: Int32, num_slots: cutlass.Constexpr, row: Int32, loaded: cute.Tensor
) -> None:
    """The warp's 16 dims of a pair of blocks, half of the tokens a turn."""
    for idx in cutlass.range_constexpr(2):
        block = cutlass.const_expr(turn // 2 * 2 + idx)
        place = base + wrapped(slot + block // SLOT_BLOCKS, num_slots) * SLOT_BYTES
        place += block % SLOT_BLOCKS * BLOCK_BYTES + turn % 2 * (32 * ROW_BYTES)
        _load(_LOAD_TRANSPOSED, place + row, loaded, 4 * idx)


@cute.jit
def store_weights(num_rows: cutlass.Constexpr, weights: cute.Tensor, place: Int32) -> None:
    """A warp's 16 tokens of all query rows, 8 by 8; the fragment's values are in that order."""
    count = cutlass.const_expr(min(4, num_rows // 4))
    for first in cutlass.range_constexpr(0, num_rows // 4, count):
        pairs = [
            cute.arch.inline_ptx(
                _PACK, write_only_types=[Int32], read_only_args=[weights[2 * idx], weights[2 * idx + 1]]
            )
            for idx in range(first, first + count)
        ]
        cute.arch.inline_ptx(
            _STORE_TRANSPOSED[count], read_only_args=[place + first // 4 * (16 * WEIGHT_BYTES), *pairs]
        )


@cute.jit
def widen_keys(loaded: cute.Tensor, words: cute.Tensor) -> None:
    """16 tokens of 64 dims as loaded, rows 0 to 7 and 8 to 15 of 16 dims after 16 dims, as operands of four steps."""
    for idx in cutlass.range_constexpr(8):
        low, high = cute.arch.inline_ptx(_WIDEN_KEYS, write_only_types=[Int32, Int32], read_only_args=[loaded[idx]])
        words[idx // 2 * 4 + idx % 2] = low
        words[idx // 2 * 4 + idx % 2 + 2] = high


@cute.jit
def widen_values(loaded: cute.Tensor, words: cute.Tensor) -> None:
    """32 tokens of 16 dims of two blocks as loaded, 8 tokens after 8 tokens, as operands of two steps of each."""
    for idx in cutlass.range_constexpr(8):
        words[2 * idx], words[2 * idx + 1] = cute.arch.inline_ptx(
            _WIDEN_VALUES, write_only_types=[Int32, Int32], read_only_args=[loaded[idx]]
        )


@cute.jit
def widen_queries(num_rows: cutlass.Constexpr, words: cute.Tensor, sizes: cute.Tensor, task: Task) -> Float32:
    """Rows of bfloat16 become float16 in their place, in the order of the keys; what they are to be divided by.

    A warp takes every eighth row, a lane the same pair of dims of each block. Rows of other sequences don't count.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32 - 4)
    lane = thread % 32
    to = lane // 8 * 8 + lane % 2 * 4 + lane % 8 // 2
    own = cute.make_rmem_tensor(cute.make_layout(NUM_BLOCKS), Int32)
    largest = Int32(0)
    for turn in cutlass.range_constexpr(num_rows // 8):
        row = turn * 8 + warp
        if task.row_tile * num_rows + row < task.rows:
            for block in cutlass.range_constexpr(NUM_BLOCKS):
                pair = words[_query_word(num_rows, row, block, lane)]
                largest = cutlass.max(largest, cutlass.max(pair & 0x7FFF, (pair >> 16) & 0x7FFF))
    largest = cute.arch.warp_redux_sync(largest, "max")
    if lane == 0:
        sizes[warp] = largest
    cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
    for other in cutlass.range_constexpr(8):
        largest = cutlass.max(largest, sizes[other])
    power = cutlass.min(254 + _QUERY_EXPONENT - (largest >> 7), Int32(253))  # with the exponent's bias
    for turn in cutlass.range_constexpr(num_rows // 8):
        row = turn * 8 + warp
        for block in cutlass.range_constexpr(NUM_BLOCKS):
            own[block] = words[_query_word(num_rows, row, block, lane)]
        cute.arch.sync_warp()
        for block in cutlass.range_constexpr(NUM_BLOCKS):
            words[_query_word(num_rows, row, block, to)] = cute.arch.inline_ptx(
                _SCALED_HALVES, write_only_types=[Int32], read_only_args=[own[block], power << 23]
            )
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=_PAIR_BARRIER, number_of_threads=256)
    return ((254 - power) << 23).bitcast(Float32)


@cute.jit
def _query_word(num_rows: cutlass.Constexpr, row: Int32, block: cutlass.Constexpr, word: Int32) -> Int32:
    """Where a pair of dims of a swizzled block of 128 bytes stands."""
    return (block * num_rows + row) * WORDS + ((word // 4) ^ (row % 8)) * 4 + word % 4
