"""MXFP8 and NVFP4 weights become the left operand of wgmma in registers, as bfloat16, which holds them without error.

Of every 16 rows lane 4 g + q holds rows g and g + 8, and of every 16 channels those at the places 2 q, 2 q + 1, 2 q + 8
and 2 q + 9. The bytes that ldmatrix brings to a lane are words of neighbouring channels, and what masks bring out of a
word are pairs of codes that aren't neighbours: so the products take their channels in another order, in which rows of
pairs must stand (see triton/channel_places). A code's fields are put where those of bfloat16 stand, as a number far
below 1, and the multiplication with the scale brings it where it belongs. The scale of NVFP4 that is 2^126 times what
is meant would not fit, so those sums are 2^-9 of what they should be.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.quantized_parts import DEPTH, slot_after

_HALF = 64  # channels of a swizzled row of pairs, and of a buffer of operands
_WORDS = 16  # of a buffer in a thread


@cute.jit
def sum_decoded(
    v: cutlass.Constexpr,
    size: cutlass.Constexpr,
    low: cute.Tensor,
    high: cute.Tensor,
    weights: cute.Tensor,
    row_tiles: cute.Pointer,
    scale_tiles: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Int32,
    phase: Int32,
    slot: Int32,
    depth: Int32,
    thread: Int32,
):
    """low, high = products of `size` pairs with the rows of either box; (stage, phase, slot) after them."""
    op = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, size, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K, OperandMajorMode.K
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    mma_thread = mma.get_slice(thread % 128)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    halves = cute.append(
        cute.tile_to_shape(atom, (size, _HALF), order=(0, 1)).outer, cute.make_layout(2, stride=v.pairs * _HALF)
    )
    tokens_layout = cute.append(halves, cute.make_layout(v.num_stages, stride=v.pairs * DEPTH))
    tokens = cute.make_tensor(cute.recast_ptr(row_tiles, atom.inner, dtype=BFloat16), tokens_layout)
    f_t = mma_thread.make_fragment_B(mma_thread.partition_B(tokens))
    sums_layout = cute.make_layout(mma_thread.partition_shape_C((64, size)))
    low_sums = cute.make_tensor(low.iterator, sums_layout)
    high_sums = cute.make_tensor(high.iterator, sums_layout)
    buffers = cute.make_rmem_tensor(cute.make_layout(2 * 2 * _WORDS), BFloat16)
    words = cute.recast_tensor(buffers, Int32)
    operand_layout = cute.make_layout(((2, 2, 2), 1, 4), stride=((1, 2, 4), 0, 8))
    lane = thread % 32
    warp_row = thread // 32 * 16
    own_row = warp_row + lane % 8 + lane // 8 % 2 * 8  # that ldmatrix asks this lane for
    own_chunk = lane // 16
    scale_row = warp_row + lane // 4
    for place in cutlass.range_constexpr(size // 2):
        low[place] = Float32(0.0)
        high[place] = Float32(0.0)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    k = Int32(0)
    while k < depth:
        cute.arch.mbarrier_wait(full + stage, phase)
        cute.arch.fence_proxy("async.shared", space="cta")  # rows were not copied by TMA
        row_bytes = cutlass.const_expr(v.scale_bytes * v.scale_stages)
        scales = scale_tiles.toint() + slot * v.slot_bytes + k % v.scale_stages * v.scale_bytes
        for box in cutlass.range_constexpr(2):
            row0 = weights.iterator.toint() + (2 * stage + box) * (v.box * v.weight_bytes)
            scale_at = scales + (box * v.box + scale_row) * row_bytes
            upper = _scales(v, scale_at, lane)
            lower = _scales(v, scale_at + 8 * row_bytes, lane)
            for half in cutlass.range_constexpr(2):
                if cutlass.const_expr(box == 1):
                    warpgroup.wait_group(1)  # the products before the last ones have read this buffer
                _decode(v, words, half * _WORDS, row0, own_row, own_chunk, half, upper, lower)
                f_w = cute.make_tensor(buffers.iterator + half * 2 * _WORDS, operand_layout)
                warpgroup.fence()
                for step in cutlass.range_constexpr(4):
                    f_step = f_t[(None, None, step, half, stage)]
                    if cutlass.const_expr(box == 0):
                        cute.gemm(mma, low_sums, f_w[(None, None, step)], f_step, low_sums)
                    else:
                        cute.gemm(mma, high_sums, f_w[(None, None, step)], f_step, high_sums)
                warpgroup.commit_group()
        warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty + stage)
        stage += 1
        if stage == v.num_stages:
            stage = Int32(0)
            phase ^= 1
        slot = slot_after(v, slot, k)
        k += 1
    return stage, phase, slot


@cute.jit
def _decode(
    v: cutlass.Constexpr,
    words: cute.Tensor,
    at: cutlass.Constexpr,
    row0: Int32,
    own_row: Int32,
    own_chunk: Int32,
    half: cutlass.Constexpr,
    upper: tuple[Int32, ...],
    lower: tuple[Int32, ...],
) -> None:
    """64 channels of 16 rows of a warp as wgmma takes them: words[at + 4 step + (row + 8) + 2 (channel + 8)]."""
    if cutlass.const_expr(v.is_nvfp4):
        chunk = half * 2 + own_chunk
        address = row0 + own_row * 64 + (chunk ^ (own_row // 2 % 4)) * 16
        found = _load_matrices(address)  # upper and lower rows of one chunk, then of the next
        for part in cutlass.range_constexpr(2):
            for row in cutlass.range_constexpr(2):
                scale = (lower if row else upper)[2 * half + part]
                four = _pairs_of_e2m1(found[2 * part + row], scale)
                for pair in cutlass.range_constexpr(4):
                    words[at + 4 * (2 * part + pair // 2) + row + 2 * (pair % 2)] = four[pair]
    else:
        for part in cutlass.range_constexpr(2):
            chunk = half * 4 + part * 2 + own_chunk
            address = row0 + own_row * 128 + (chunk ^ (own_row % 8)) * 16
            found = _load_matrices(address)
            for step in cutlass.range_constexpr(2):
                for row in cutlass.range_constexpr(2):
                    scale = (lower if row else upper)[2 * half + part]
                    two = _pairs_of_e4m3(found[2 * step + row], scale)
                    for pair in cutlass.range_constexpr(2):
                        words[at + 4 * (2 * part + step) + row + 2 * pair] = two[pair]


@cute.jit
def _scales(v: cutlass.Constexpr, address: Int32, lane: Int32):
    """Of a row the four factors of its channels in fours of 32, each twice in a register."""
    if cutlass.const_expr(v.is_nvfp4):
        selector = Int32(0x6420)  # of every 32 channels the first or the second 16
        if lane % 4 >= 2:
            selector = Int32(0x7531)
        factors = cute.arch.inline_ptx(
            "{ .reg .b32 a, b, s, m, n;"
            " mov.b32 m, 0x7E807E80; mov.b32 n, 0x77007700;"
            " ld.shared.v2.b32 {a, b}, [{$r0}];"
            " prmt.b32 s, a, b, {$r1};"
            " prmt.b32 a, s, 0, 0x1404; shr.u32 a, a, 4;"
            " mul.bf16x2 a, a, m; mul.bf16x2 a, a, n;"
            " prmt.b32 b, s, 0, 0x3424; shr.u32 b, b, 4;"
            " mul.bf16x2 b, b, m; mul.bf16x2 b, b, n;"
            " prmt.b32 {$w0}, a, a, 0x1010; prmt.b32 {$w1}, a, a, 0x3232;"
            " prmt.b32 {$w2}, b, b, 0x1010; prmt.b32 {$w3}, b, b, 0x3232; }",
            write_only_types=[Int32, Int32, Int32, Int32],
            read_only_args=[address, selector],
        )
    else:
        factors = cute.arch.inline_ptx(
            "{ .reg .b32 s, m;"
            " ld.shared.b32 s, [{$r0}];"
            " mov.b32 m, 0x00400040;"
            " prmt.b32 {$w0}, s, 0, 0x0404; shr.u32 {$w0}, {$w0}, 1; max.u16x2 {$w0}, {$w0}, m;"
            " prmt.b32 {$w1}, s, 0, 0x1414; shr.u32 {$w1}, {$w1}, 1; max.u16x2 {$w1}, {$w1}, m;"
            " prmt.b32 {$w2}, s, 0, 0x2424; shr.u32 {$w2}, {$w2}, 1; max.u16x2 {$w2}, {$w2}, m;"
            " prmt.b32 {$w3}, s, 0, 0x3434; shr.u32 {$w3}, {$w3}, 1; max.u16x2 {$w3}, {$w3}, m; }",
            write_only_types=[Int32, Int32, Int32, Int32],
            read_only_args=[address],
        )
    return factors


@cute.jit
def _load_matrices(address: Int32):
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address],
    )


@cute.jit
def _pairs_of_e2m1(word: Int32, scale: Int32):
    """Eight codes to pairs: codes j and j + 4 in pair j, times the scale and 2^-126."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, v;"
        " and.b32 a, {$r0}, 0x000F000F; mul.lo.u32 a, a, 4160; and.b32 a, a, 0x81C081C0;"
        " mul.bf16x2 {$w0}, a, {$r1};"
        " and.b32 a, {$r0}, 0x00F000F0; mul.lo.u32 a, a, 260; and.b32 a, a, 0x81C081C0;"
        " mul.bf16x2 {$w1}, a, {$r1};"
        " shr.u32 v, {$r0}, 8;"
        " and.b32 a, v, 0x000F000F; mul.lo.u32 a, a, 4160; and.b32 a, a, 0x81C081C0;"
        " mul.bf16x2 {$w2}, a, {$r1};"
        " shr.u32 a, {$r0}, 6; and.b32 a, a, 0x01C001C0;"
        " lop3.b32 a, {$r0}, 0x80008000, a, 0xEA;"
        " mul.bf16x2 {$w3}, a, {$r1}; }",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[word, scale],
    )


@cute.jit
def _pairs_of_e4m3(word: Int32, scale: Int32):
    """Four codes to pairs: codes j and j + 2 in pair j, times 2^120 and the scale, which together might not fit."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 a, b, m;"
        " mov.b32 m, 0x7B807B80;"
        " shl.b32 b, {$r0}, 8; shl.b32 a, {$r0}, 4; and.b32 a, a, 0x07F007F0;"
        " lop3.b32 a, b, 0x80008000, a, 0xEA;"
        " mul.bf16x2 a, a, m; mul.bf16x2 {$w0}, a, {$r1};"
        " shr.u32 a, {$r0}, 4; and.b32 a, a, 0x07F007F0;"
        " lop3.b32 a, {$r0}, 0x80008000, a, 0xEA;"
        " mul.bf16x2 a, a, m; mul.bf16x2 {$w1}, a, {$r1}; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word, scale],
    )


@cute.jit
def factor_of(global_scale: cute.Tensor) -> Float32:
    """What sums of NVFP4 are multiplied by: 2^9, which they lack, and one by the global scale."""
    return cute.arch.inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[Float32(512.0), global_scale[0]],
    )
