"""Tiles of E4M3 become tiles of bfloat16 in shared memory, by a warpgroup between the producer and the consumers.

The producer fills a ring with rows of bytes as they come. This warpgroup widens slot after slot, 64 tokens of 192
columns, into the ring that the consumers read, in the swizzled order of the matrix instructions. E4M3 widens exactly: a
byte's exponent and mantissa are moved to where bfloat16 has them, and a product with 2^120 mends the bias of the
exponent, of subnormal numbers too. The byte of NaN becomes 480.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dist_infer.kernels.cute.mla_tiles import BLOCK, TILE, Task

COLUMNS = 192  # of a slot
SLOT_WORDS = COLUMNS // 2  # of 16 bits, of a row
NUM_THREADS = 128
SLOTS_OF_TILE = 3
_CHUNKS_OF_ROW = COLUMNS // 16
_TURNS = TILE * _CHUNKS_OF_ROW // NUM_THREADS  # chunks of 16 bytes that a thread widens
_TOGETHER = 3  # of them, whose loads are under way at once
_UNITS_OF_ROW = BLOCK // 8  # of 16 bytes, in a block of 64 bfloat16
_UNITS_OF_BLOCK = TILE * _UNITS_OF_ROW
_UNITS_OF_SLOT = COLUMNS // BLOCK * _UNITS_OF_BLOCK
# Four bytes to four bfloat16: bytes 0 and 2 in one word, 1 and 3 in another, then the pairs in order.
_WIDEN = """{
    .reg .b32 a, b, c;
    shl.b32 a, {$r0}, 4;
    shl.b32 b, {$r0}, 8;
    shr.b32 c, {$r0}, 4;
    and.b32 a, a, 0x07F007F0;
    and.b32 c, c, 0x07F007F0;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    lop3.b32 c, {$r0}, 0x80008000, c, 0xEA;
    prmt.b32 b, a, c, 0x5410;
    prmt.b32 a, a, c, 0x7632;
    mov.b32 c, 0x7B807B80;
    mul.rn.bf16x2 {$w0}, b, c;
    mul.rn.bf16x2 {$w1}, a, c;
}"""


@cute.jit
def widen_tiles(
    num_narrow: cutlass.Constexpr,
    num_wide: cutlass.Constexpr,
    narrow: cute.Tensor,  # [word of 4 bytes, slot]
    wide: cute.Tensor,  # [word, 16 bytes]
    narrow_full: cute.Pointer,
    narrow_empty: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    task: Task,
) -> None:
    """What the warpgroup does with a worker's tiles; the rings have so many slots."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta % NUM_THREADS
    left = (task.end - task.first) * SLOTS_OF_TILE
    slot, phase = Int32(0), Int32(0)
    to, to_phase = Int32(0), Int32(1)  # the phase before the first counts as done
    while left > 0:
        cute.arch.mbarrier_wait(empty + to, to_phase)
        cute.arch.mbarrier_wait(narrow_full + slot, phase)
        _widen(narrow[None, slot], wide, to * _UNITS_OF_SLOT, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(narrow_empty + slot)
            cute.arch.mbarrier_arrive(full + to)
        slot += 1
        if slot == num_narrow:
            slot = Int32(0)
            phase ^= 1
        to += 1
        if to == num_wide:
            to = Int32(0)
            to_phase ^= 1
        left -= 1


@cute.jit
def _widen(narrow: cute.Tensor, wide: cute.Tensor, first_unit: Int32, thread: Int32) -> None:
    """A thread's share of a slot."""
    row = thread // _CHUNKS_OF_ROW
    chunk = thread % _CHUNKS_OF_ROW
    loaded = cute.make_rmem_tensor(cute.make_layout((4, _TOGETHER)), Int32)
    pairs = cute.make_rmem_tensor(cute.make_layout((4, 2)), Int32)
    for turn in cutlass.range_constexpr(_TURNS):
        if cutlass.const_expr(turn % _TOGETHER == 0):
            for ahead in cutlass.range_constexpr(_TOGETHER):
                place = cute.local_tile(narrow, (4,), (thread + NUM_THREADS * (turn + ahead),))
                cute.autovec_copy(place, loaded[None, ahead])
        block = chunk // 4
        odd = block % 2  # neighbours begin with other halves, so that they write to other banks
        for half in cutlass.range_constexpr(2):
            for idx in cutlass.range_constexpr(2):
                word = loaded[2 * half + idx, turn % _TOGETHER]
                if odd == 1:
                    word = loaded[2 - 2 * half + idx, turn % _TOGETHER]
                low, high = cute.arch.inline_ptx(_WIDEN, write_only_types=[Int32, Int32], read_only_args=[word])
                pairs[2 * idx, half] = low
                pairs[2 * idx + 1, half] = high
        unit = first_unit + block * _UNITS_OF_BLOCK + row * _UNITS_OF_ROW + ((chunk % 4 * 2 + odd) ^ (row % 8))
        cute.autovec_copy(pairs[None, 0], wide[None, unit])
        cute.autovec_copy(pairs[None, 1], wide[None, unit ^ 1])
        chunk += NUM_THREADS % _CHUNKS_OF_ROW
        row += NUM_THREADS // _CHUNKS_OF_ROW
        if chunk >= _CHUNKS_OF_ROW:
            chunk -= _CHUNKS_OF_ROW
            row += 1
