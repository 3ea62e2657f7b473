"""The second product of a decode over a cache of E4M3, O^T = V^T P^T: bytes become operands of float16 in registers.

Loads of 8 x 8 words leave a thread with two neighbouring dims of two neighbouring tokens: so rows g and g + 8 of the
product are dims 2 g and 2 g + 1. Weights are float16 times 2^15: those below 2^-39 of the largest one become 0
(2^-31 where maxima may lag, see mla_narrow_tiles).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dist_infer.kernels.cute.mla_tiles import BLOCK, NUM_BLOCKS, TILE, wrapped

WORDS = BLOCK // 2  # of 16 bits, in a row of a block
SLOT_BLOCKS = 3
SLOTS_OF_TILE = NUM_BLOCKS // SLOT_BLOCKS
ROW_BYTES = BLOCK
BLOCK_BYTES = TILE * ROW_BYTES
SLOT_BYTES = SLOT_BLOCKS * BLOCK_BYTES
STEPS = 4  # of 16, in a block
WEIGHT_BYTES = 2 * TILE  # of a query row
WEIGHT_EXPONENT = 15
_LOAD = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
# Two tokens' pairs of dims to each dim's pair of tokens.
_WIDEN_VALUES = """{
    .reg .b32 a;
    .reg .b16 l, h;
    prmt.b32 a, {$r0}, 0, 0x3120;
    mov.b32 {l, h}, a;
    cvt.rn.f16x2.e4m3x2 {$w0}, l;
    cvt.rn.f16x2.e4m3x2 {$w1}, h;
}"""
# Two tokens' pairs of dims, and those of the tokens 8 on, to each dim's four tokens.
_GATHER_VALUES = """{
    prmt.b32 {$w0}, {$r0}, {$r1}, 0x6420;
    prmt.b32 {$w1}, {$r0}, {$r1}, 0x7531;
}"""
_PACK_FOUR = """{
    .reg .b16 l, h;
    cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0};
    cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2};
    mov.b32 {$w0}, {l, h};
}"""
_STORE = "st.shared.b32 [{$r0}], {$r1};"
_CLEAR = """{
    .reg .b32 z;
    mov.b32 z, 0;
    st.shared.v4.b32 [{$r0}], {z, z, z, z};
}"""
_PACK = "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};"
_STORE_TRANSPOSED = {
    2: "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], {{$r1}, {$r2}};",
    4: "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
}


@cute.jit
def load_values(
    turn: cutlass.Constexpr, base: Int32, slot: Int32, num_slots: cutlass.Constexpr, row: Int32, loaded: cute.Tensor
) -> None:
    """The warp's 16 dims of a pair of blocks, half of the tokens a turn; a lane's row of 16 bytes begins at `row`."""
    for idx in cutlass.range_constexpr(2):
        block = cutlass.const_expr(turn // 2 * 2 + idx)
        place = base + wrapped(slot + block // SLOT_BLOCKS, num_slots) * SLOT_BYTES
        place += block % SLOT_BLOCKS * BLOCK_BYTES + turn % 2 * (32 * ROW_BYTES)
        taken = cute.arch.inline_ptx(_LOAD, write_only_types=[Int32] * 4, read_only_args=[place + row])
        for matrix in cutlass.range_constexpr(4):
            loaded[4 * idx + matrix] = taken[matrix]


@cute.jit
def clear_values(
    blocks: cutlass.Constexpr, base: Int32, slot: Int32, num_slots: cutlass.Constexpr, row: Int32, token: Int32
) -> None:
    """Zeros in a warp's dims from `token` of a tile on: there may be NaN, which a weight of 0 does not cancel."""
    for half in cutlass.range_constexpr(2):
        if half * 32 + cute.arch.lane_idx() >= token:
            for block in cutlass.range_constexpr(blocks[0], blocks[1]):
                place = base + wrapped(slot + block // SLOT_BLOCKS, num_slots) * SLOT_BYTES
                place += block % SLOT_BLOCKS * BLOCK_BYTES + half * (32 * ROW_BYTES)
                cute.arch.inline_ptx(_CLEAR, read_only_args=[place + row])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def store_weights(num_rows: cutlass.Constexpr, weights: cute.Tensor, place: Int32) -> None:
    """A warp's 16 tokens of all query rows, 8 by 8; the fragment's values are in that order."""
    count = cutlass.const_expr(min(4, num_rows // 4))
    for first in cutlass.range_constexpr(0, num_rows // 4, count):
        pairs = [pack(weights[2 * idx], weights[2 * idx + 1]) for idx in range(first, first + count)]
        cute.arch.inline_ptx(
            _STORE_TRANSPOSED[count], read_only_args=[place + first // 4 * (16 * WEIGHT_BYTES), *pairs]
        )


@cute.jit
def pack(first: Float32, second: Float32) -> Int32:
    """Two numbers as float16 in a word, the first in its lower half."""
    return cute.arch.inline_ptx(_PACK, write_only_types=[Int32], read_only_args=[first, second])


@cute.jit
def pack_four(numbers) -> Int32:
    """As E4M3 in a word, the first in its lowest byte."""
    return cute.arch.inline_ptx(_PACK_FOUR, write_only_types=[Int32], read_only_args=[*numbers])


@cute.jit
def store_narrow_weights(words: cute.Tensor, place: Int32, row: Int32, quarter: Int32) -> None:
    """Weights of E4M3 of `row` and the row 8 on, [token, row]; each word has tokens 2 q, 2 q + 1 and those 8 on."""
    for h in cutlass.range_constexpr(2):
        for unit in cutlass.range_constexpr(TILE // 16):
            at = place + (row + 8 * h) * TILE + (unit ^ (row // 2 % 4)) * 16 + quarter * 4
            cute.arch.inline_ptx(_STORE, read_only_args=[at, words[4 * h + unit]])


@cute.jit
def gather_values(loaded: cute.Tensor, words: cute.Tensor) -> None:
    """32 tokens of 16 dims of two blocks as loaded, as operands of E4M3 of a step of each."""
    for idx in cutlass.range_constexpr(4):
        words[2 * idx], words[2 * idx + 1] = cute.arch.inline_ptx(
            _GATHER_VALUES, write_only_types=[Int32, Int32], read_only_args=[loaded[2 * idx], loaded[2 * idx + 1]]
        )


@cute.jit
def widen_values(loaded: cute.Tensor, words: cute.Tensor) -> None:
    """32 tokens of 16 dims of two blocks as loaded, 8 tokens after 8 tokens, as operands of two steps of each."""
    for idx in cutlass.range_constexpr(8):
        words[2 * idx], words[2 * idx + 1] = cute.arch.inline_ptx(
            _WIDEN_VALUES, write_only_types=[Int32, Int32], read_only_args=[loaded[idx]]
        )
