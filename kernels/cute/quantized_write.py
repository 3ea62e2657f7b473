"""What a grouped product with quantised weights leaves for the next one: quantised, or in the order of its inputs."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dist_infer.kernels.cute.grouped_gemm_parts import PASS, PASS_BYTES, STEP
from dist_infer.kernels.cute.grouped_gemm_write import packed
from dist_infer.kernels.cute.moe_copies import load_four, store_transposed

_WIDTH = 128  # channels of a block
_ROW_BYTES = 2 * _WIDTH


@cute.jit
def write_quantized(
    v: cutlass.Constexpr,
    gates: cute.Tensor,
    ups: cute.Tensor,
    buffer: Int32,
    out: cute.Tensor,
    out_scales: Any,
    first: Int32,
    count: Int32,
    block: Int32,
    channels: Int32,
    thread: Int32,
) -> None:
    """A block of all pairs of a tile: rounded, turned so that 8 threads have all of a pair's, and quantised 1 x 128.

    Values of a thread are as of grouped_gemm_write.write; here warps are counted over both warpgroups.
    """
    warp, lane = thread // 32, thread % 32
    chunk = warp * 2 + lane // 8 % 2
    own = lane % 8 + lane // 16 * 8
    to_shared = buffer + own * _ROW_BYTES + (chunk ^ (own % 8)) * 16
    part, own_pair = thread % 8, thread // 8
    from_shared = buffer + own_pair * _ROW_BYTES + (part ^ (own_pair % 8)) * 16
    cute.arch.barrier(barrier_id=1, number_of_threads=256)  # what was written before has been read
    for turn in cutlass.range_constexpr((v.pairs + PASS - 1) // PASS):
        if turn * PASS < count:
            place = cutlass.const_expr(turn % v.num_passes * 2 * PASS_BYTES)
            for half in cutlass.range_constexpr(min(2, (v.pairs - turn * PASS) // STEP)):
                at = cutlass.const_expr((turn * PASS + half * STEP) // 2)
                store_transposed(
                    to_shared + place + half * (STEP * _ROW_BYTES),
                    *(packed(v, gates, ups, at + 2 * idx) for idx in range(4)),
                )
            cute.arch.barrier(barrier_id=1, number_of_threads=256)
            words = (*load_four(from_shared + place), *load_four(from_shared + place + _WIDTH))
            pair = turn * PASS + own_pair
            scale, inverse = _scale_of(words)
            if pair < count:
                row = Int64(first + pair)
                target = out.iterator.toint() + row * channels + block * _WIDTH + part * 8
                for half in cutlass.range_constexpr(2):
                    low = _narrowed(words[4 * half], words[4 * half + 1], inverse)
                    _store_8_bytes(
                        target + half * 64, low, _narrowed(words[4 * half + 2], words[4 * half + 3], inverse)
                    )
                if part == 0:
                    place_of_scale = row * (channels // _WIDTH) + block
                    _store_float(out_scales.iterator.toint() + place_of_scale * 4, scale)


@cute.jit
def _scale_of(words: tuple[Int32, ...]):
    """(scale, its inverse) of the block whose values 8 threads have, 16 each; the inverse is that of a true division.

    NaN is larger than all.
    """
    amax = words[0] & 0x7FFF7FFF
    for idx in cutlass.range_constexpr(1, 8):
        amax = _larger(amax, words[idx] & 0x7FFF7FFF)
    for step in cutlass.range_constexpr(3):
        amax = _larger(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
    return cute.arch.inline_ptx(
        "{ .reg .f32 a, b;"
        " shl.b32 a, {$r0}, 16; and.b32 b, {$r0}, 0xFFFF0000;"
        " max.NaN.f32 a, a, b;"
        " max.NaN.f32 a, a, 0f2EDBE6FF;"  # 1e-10
        " mul.rn.f32 {$w0}, a, 0f3B124925;"  # 1 / 448
        " div.rn.f32 {$w1}, 0f3F800000, {$w0}; }",
        write_only_types=[Float32, Float32],
        read_only_args=[amax],
    )


@cute.jit
def _larger(a: Int32, b: Int32) -> Int32:
    """Of bfloat16, two at a time."""
    return cute.arch.inline_ptx("max.NaN.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


@cute.jit
def _narrowed(a: Int32, b: Int32, factor: Float32) -> Int32:
    """Four bfloat16 times a factor, as E4M3."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 w, x, y, z; .reg .b16 l, h;"
        " shl.b32 w, {$r0}, 16; and.b32 x, {$r0}, 0xFFFF0000;"
        " shl.b32 y, {$r1}, 16; and.b32 z, {$r1}, 0xFFFF0000;"
        " mul.rn.f32 w, w, {$r2}; mul.rn.f32 x, x, {$r2};"
        " mul.rn.f32 y, y, {$r2}; mul.rn.f32 z, z, {$r2};"
        " cvt.rn.satfinite.e4m3x2.f32 l, x, w; cvt.rn.satfinite.e4m3x2.f32 h, z, y;"
        " mov.b32 {$w0}, {l, h}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, factor],
    )


@cute.jit
def _store_8_bytes(target: Int64, a: Int32, b: Int32) -> None:
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[target, a, b])


@cute.jit
def _store_float(target: Int64, value: Float32) -> None:
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[target, value])


@cute.jit
def scatter(
    v: cutlass.Constexpr,
    values: cute.Tensor,
    rows: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    channel: Int32,
    channels: Int32,
    thread: Int32,
) -> None:
    """64 channels of few pairs, rounded: each thread stores what it has, and none waits for another.

    Values of a thread are as of grouped_gemm_write.write; rows those of its pairs, see `pair_of`.
    """
    own_channel = channel + thread // 32 * 16 + thread % 32 // 4
    target = out.iterator.toint() + Int64(own_channel * 2)
    row_bytes = out.stride[0] * 2
    for idx in cutlass.range_constexpr(v.pairs // 4):
        if pair_of(idx, thread) < count and channel < channels:
            row = target + Int64(rows[idx]) * row_bytes
            for h in cutlass.range_constexpr(2):
                value = values[idx // 2 * 4 + idx % 2 + 2 * h]
                cute.arch.inline_ptx(
                    "{ .reg .b16 a; cvt.rn.bf16.f32 a, {$r1}; st.global.b16 [{$r0}], a; }",
                    read_only_args=[row + h * 16, value],
                )


@cute.jit
def pair_of(idx: cutlass.Constexpr, thread: Int32) -> Int32:
    """Of the pairs of a tile that a thread has sums of, one of each eight's two."""
    return idx // 2 * 8 + thread % 4 * 2 + idx % 2


@cute.jit
def move_in_places(v: cutlass.Constexpr, target: Int64, source: Int32) -> None:
    """Eight channels of a row on their way out go where `in_places` of triton/channel_places would put them.

    `source` is that of grouped_gemm_write.write, in rows of 64 channels whose chunks are swizzled.
    """
    row = source & ~127
    swizzle = row // 128 % 8
    chunk = source // 16 % 8 ^ swizzle
    words = cute.make_rmem_tensor(cute.make_layout(8), Int32)
    for place in cutlass.range_constexpr(8):  # 2 q + i, of channels 2 word and 2 word + 1
        if cutlass.const_expr(v.is_nvfp4):
            word = chunk // 4 * 16 + 2 * place + chunk // 2 % 2
        else:
            word = chunk // 2 * 8 + place
        words[place] = _load_word(row + (word // 4 ^ swizzle) * 16 + word % 4 * 4)
    selector = Int32(0x5410)
    if chunk % 2 == 1:
        selector = Int32(0x7632)
    cute.arch.inline_ptx(
        "{ .reg .b32 a, b, c, d;"
        " prmt.b32 a, {$r1}, {$r2}, {$r9}; prmt.b32 b, {$r3}, {$r4}, {$r9};"
        " prmt.b32 c, {$r5}, {$r6}, {$r9}; prmt.b32 d, {$r7}, {$r8}, {$r9};"
        " st.global.v4.b32 [{$r0}], {a, b, c, d}; }",
        read_only_args=[target, *(words[place] for place in range(8)), selector],
    )


@cute.jit
def _load_word(source: Int32) -> Int32:
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[source])
