"""The warpgroups that multiply by a staged weight: dequantisation in registers, and products.

bfloat16 holds every value of a weight. A mask leaves the fields of a code where those of bfloat16 stand, as a number
far below 1, and one multiplication by the scale, kept as far above, makes it what it is: NVFP4 by 2^-8, which the
factor of all sums makes good. The scale of MXFP8 doesn't go together with the 2^120 that E4M3 lacks if it is above
2^7.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.staged_sums import add_parts, leave_part, write_rows
from dist_infer.kernels.staged_weight import ROWS

# A word to four pairs, the first two times $r1, the others times $r2.
_E2M1 = """{
.reg .b32 a, b;
and.b32 a, {$r0}, 0x81C081C0;
mul.bf16x2 {$w0}, a, {$r1};
shf.r.wrap.b32 a, {$r0}, {$r0}, 6;
and.b32 a, a, 0x81C081C0;
mul.bf16x2 {$w1}, a, {$r1};
shl.b32 a, {$r0}, 6;
and.b32 a, a, 0x81C081C0;
mul.bf16x2 {$w2}, a, {$r2};
shf.r.wrap.b32 a, {$r0}, {$r0}, 4;
and.b32 a, a, 0x80C080C0;
shl.b32 b, {$r0}, 4;
lop3.b32 a, b, 0x01000100, a, 0xEA;
mul.bf16x2 {$w3}, a, {$r2};
}"""
# A word to two pairs, without and with a scale that is multiplied by after 2^120.
_E4M3_PAIRS = """{
.reg .b32 a, b, c;
mov.b32 c, 0x7B807B80;
and.b32 a, {$r0}, 0x87F087F0;
%s
mul.bf16x2 {$w0}, a, {$r1};
and.b32 a, {$r0}, 0x000F000F;
mul.lo.u32 a, a, 0x1010;
shr.u32 b, {$r0}, 4;
and.b32 b, b, 0x07800780;
lop3.b32 a, a, 0x80708070, b, 0xEA;
%s
mul.bf16x2 {$w1}, a, {$r1};
}"""
_E4M3 = _E4M3_PAIRS % ("", "")
_STEEP_E4M3 = _E4M3_PAIRS % ("mul.bf16x2 a, a, c;", "mul.bf16x2 a, a, c;")
# Two bytes of a word, of rows g and g + 8, as factors, each twice. ptxas makes `mov` part of the multiplication.
_FACTORS = """{
.reg .b32 a, m;
.reg .b16 l, h;
prmt.b32 a, {$r0}, 0, {$r1};
%s
mov.b32 {l, h}, a;
mov.b32 {$w0}, {l, l};
mov.b32 {$w1}, {h, h};
}"""
_NVFP4_FACTORS = _FACTORS % f"mad.lo.u32 a, a, 16, {(235 << 7) * 0x10001};"  # 2^118
_MXFP8_FACTORS = _FACTORS % f"mad.lo.u32 a, a, 128, {(120 << 7) * 0x10001};"
_STEEP_FACTORS = _FACTORS % "shl.b32 a, a, 7;\nmov.b32 m, 0x00400040;\nmax.u16x2 a, a, m;"  # byte 0 is 2^-127


@cute.jit
def multiply(
    v: cutlass.Constexpr,
    inputs: cute.Tensor,
    weights: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    left: cute.Pointer,
    factor: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    parts: cute.Tensor,
    flags: cute.Tensor,
    begin: Int32,
    end: Int32,
    num_across: Int32,
    row_blocks: Int32,
    total: Int32,
    cta: Int32,
    num_ctas: Int32,
    room: Int32,  # of shared memory, for results
) -> None:
    """Stages `end` - 1 down to `begin` of the sequence, each warpgroup 64 rows."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta % 128
    group = cute.arch.make_warp_uniform(thread_of_cta // 128)
    warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
    op = warpgroup.MmaF16BF16Op(
        BFloat16,
        Float32,
        (64, v.tokens, 16),
        warpgroup.OperandSource.RMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))
    mma.set(warpgroup.Field.ACCUMULATE, True)
    own = mma.get_slice(thread)
    f_x = own.make_fragment_B(own.partition_B(inputs))
    sums = own.make_fragment_C(own.partition_shape_C((64, v.tokens)))
    steps = cutlass.const_expr(v.columns // 32)  # of a tile, 16 columns each
    held = cutlass.const_expr(steps // 2)  # in a buffer
    buffers = cutlass.const_expr(1 if v.tokens > 64 else 2)  # registers hold no more
    held_words = cutlass.const_expr(held // 2 if v.is_nvfp4 else held)
    values = cute.make_rmem_tensor(cute.make_layout(8 * held * buffers), BFloat16)
    f_w = cute.make_tensor(values.iterator, cute.make_layout(((2, 2, 2), 1, held * buffers), stride=((1, 2, 4), 0, 8)))
    words = cute.make_rmem_tensor(cute.make_layout((4, 2)), Int32)
    scales = cute.make_rmem_tensor(cute.make_layout((steps // 2 if v.is_nvfp4 else 1,)), Int32)
    fours = cute.make_tensor(weights, cute.make_layout((4, v.weight_bytes // 16 * v.num_stages), stride=(1, 4)))
    ones = cute.make_tensor(weights, cute.make_layout((1, v.weight_bytes // 4 * v.num_stages), stride=(1, 1)))
    stage, phase = Int32(0), Int32(0)
    at = end
    while at > begin:
        block = (at - 1) // num_across
        start = cutlass.max(begin, block * num_across)
        is_whole = at == (block + 1) * num_across  # at its end: later CTAs have none of it
        sums.fill(0.0)
        while at > start:
            cute.arch.mbarrier_wait(full + stage, phase)
            for tile in cutlass.range_constexpr(2):
                first = stage * (v.weight_bytes // 16) + (group * 2 + tile) * (v.tile_bytes // 16)
                for half in cutlass.range_constexpr(2):
                    cute.autovec_copy(fours[None, first + warp * 64 + half * 32 + lane], words[None, half])
                if cutlass.const_expr(v.is_nvfp4):
                    cute.autovec_copy(fours[None, first + 256 + warp * 8 + lane // 4], scales)
                else:
                    cute.autovec_copy(ones[None, (first + 256) * 4 + warp * 8 + lane // 4], scales)
                for part in cutlass.range_constexpr(2):
                    turn = cutlass.const_expr(2 * tile + part)
                    if cutlass.const_expr(turn >= buffers):
                        warpgroup.wait_group(buffers - 1)  # what has read this buffer
                    buffer = cutlass.const_expr(turn % buffers * held)
                    into = cute.recast_tensor(values, Int32)
                    _dequantize(v, words, scales, into, 4 * buffer, part * held_words, held_words)
                    warpgroup.fence()
                    for step in cutlass.range_constexpr(held):
                        k = cutlass.const_expr(tile * steps + part * held + step)
                        f_step = f_x[(None, None, k % 4, stage * (v.columns // 64) + k // 4)]
                        cute.gemm(mma, sums, f_w[(None, None, buffer + step)], f_step, sums)
                    warpgroup.commit_group()
            # Were products under way where the code branches, ptxas would have each wait for the one before
            warpgroup.wait_group(0)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(empty + stage)
            stage += 1
            if stage == v.num_stages:
                stage = Int32(0)
                phase ^= 1
            at -= 1
        if is_whole:
            before = cta - ((block * num_across + 1) * num_ctas - 1) // total  # CTAs that have parts of it
            if before > 0:
                add_parts(v, sums, parts, flags, cta, before, group * 4 + warp, lane)
            token0, output0 = block // row_blocks * v.tokens, block % row_blocks * ROWS
            write_rows(v, sums, factor, bias, out, token0, output0, room, group * 4 + warp, lane)
        else:
            leave_part(v, sums, parts, left, flags, cta, group * 4 + warp, lane)


@cute.jit
def _dequantize(
    v: cutlass.Constexpr,
    words: cute.Tensor,
    scales: cute.Tensor,
    into: cute.Tensor,
    at: cutlass.Constexpr,
    first: cutlass.Constexpr,
    num_words: cutlass.Constexpr,
) -> None:
    """Registers of operands from `at` on: of every 16 columns two pairs, each of rows g and g + 8."""
    num = cutlass.const_expr(4 if v.is_nvfp4 else 2)  # pairs of a word
    for idx_word in cutlass.range_constexpr(num_words):
        word = cutlass.const_expr(first + idx_word)
        if cutlass.const_expr(v.is_nvfp4):
            low = _factors(_NVFP4_FACTORS, scales[word], 0x4140)
            high = _factors(_NVFP4_FACTORS, scales[word], 0x4342)
        elif cutlass.const_expr(word % 2 == 0):
            asm = cutlass.const_expr(_STEEP_FACTORS if v.is_steep else _MXFP8_FACTORS)
            low = _factors(asm, scales[0], 0x4140 if word == 0 else 0x4342)
        for half in cutlass.range_constexpr(2):
            if cutlass.const_expr(v.is_nvfp4):
                pairs = _pairs(_E2M1, 4, [words[word, half], low[half], high[half]])
            else:
                asm = cutlass.const_expr(_STEEP_E4M3 if v.is_steep else _E4M3)
                pairs = _pairs(asm, 2, [words[word, half], low[half]])
            for idx in cutlass.range_constexpr(num):
                into[at + 2 * num * idx_word + 2 * idx + half] = pairs[idx]


@cute.jit
def _factors(asm: cutlass.Constexpr, word: Int32, selector: cutlass.Constexpr):
    return cute.arch.inline_ptx(asm, write_only_types=[Int32, Int32], read_only_args=[word, Int32(selector)])


@cute.jit
def _pairs(asm: cutlass.Constexpr, num: cutlass.Constexpr, operands: Any):
    return cute.arch.inline_ptx(asm, write_only_types=[Int32] * num, read_only_args=operands)
