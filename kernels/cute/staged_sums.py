"""What becomes of the sums of a product with a staged weight: parts of them for another CTA, or results.

A thread of a warpgroup's products has as value i + 2 h + 4 j that of output 16 w + g + 8 h and token 8 j + 2 c + i, in
warp w and lane 4 g + c. Results written from there would be 16 bytes of a row each: they go through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

ROOM_BYTES = 16 * 64 * 2  # 16 tokens of a warpgroup's outputs


@cute.jit
def write_rows(
    v: cutlass.Constexpr,
    sums: cute.Tensor,
    factor: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    token0: Int32,
    output0: Int32,
    room: Int32,
    warp_of_cta: Int32,
    lane: Int32,
) -> None:
    """A warpgroup's 64 outputs of a CTA's, up to 16 tokens at a time; of a token 8 threads write 8 outputs each."""
    group, warp = warp_of_cta // 4, warp_of_cta % 4
    room += group * ROOM_BYTES
    output0 += group * 64
    by = factor[0]
    together = cutlass.const_expr(min(16, v.tokens))
    to = room + (lane // 16 * 8 + lane % 8) * 128 + ((2 * warp + lane // 8 % 2) ^ (lane % 8)) * 16
    row, eight = 4 * warp + lane // 8, lane % 8
    source = room + row * 128 + (eight ^ (row % 8)) * 16
    added = _biases(v, bias, output0 + 16 * warp + lane // 4, out.shape[1])
    results = cute.make_rmem_tensor(cute.make_layout((together // 2,)), BFloat16)
    words = cute.recast_tensor(results, Int32)
    for first in cutlass.range_constexpr(0, v.tokens, together):
        for idx in cutlass.range_constexpr(together // 2):
            results[idx] = (sums[first // 2 + idx] * by + added[idx // 2 % 2]).to(BFloat16)
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
            if together == 16
            else "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[to, *(words[idx] for idx in range(together // 4))],
        )
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
        token = token0 + first + row
        if row < together and token < out.shape[0]:
            _write_eight(out, token, output0 + 8 * eight, source)
        cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)  # before the next are stored there


@cute.jit
def _biases(v: cutlass.Constexpr, bias: cute.Tensor, output: Int32, num_outputs: Int32):
    """Of outputs `output` and `output` + 8."""
    found = cute.make_rmem_tensor(cute.make_layout((2,)), Float32)
    found.fill(0.0)
    if cutlass.const_expr(v.has_bias):
        for half in cutlass.range_constexpr(2):
            if output + 8 * half < num_outputs:
                found[half] = bias[output + 8 * half].to(Float32)
    return found


@cute.jit
def _write_eight(out: cute.Tensor, token: Int32, output: Int32, source: Int32) -> None:
    """16 bytes of shared memory, as far as there are outputs."""
    words = cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[source],
    )
    num_outputs = out.shape[1]
    to = out.iterator.toint() + (Int64(token) * num_outputs + output) * 2
    if num_outputs % 8 == 0:
        if output < num_outputs:
            cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[to, *words])
    else:
        for idx in cutlass.range_constexpr(8):
            if output + idx < num_outputs:
                cute.arch.inline_ptx(
                    "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.global.b16 [{$r0}], %s; }"
                    % ("high" if idx % 2 else "low"),
                    read_only_args=[to + 2 * idx, words[idx // 2]],
                )


@cute.jit
def leave_part(
    v: cutlass.Constexpr,
    sums: cute.Tensor,
    parts: cute.Tensor,
    left: cute.Pointer,
    flags: cute.Tensor,
    cta: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """A thread's sums for the thread of its number in another CTA; who says so: see `has_teller`."""
    target = _place_of(v, parts, cta, warp, lane)
    for four in cutlass.range_constexpr(v.tokens // 8):
        cute.arch.inline_ptx(
            "st.global.cg.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
            read_only_args=[target + four * 512, *(sums[4 * four + idx] for idx in range(4))],
        )
    cute.arch.sync_warp()
    if cutlass.const_expr(v.has_teller):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(left)
    else:
        if lane == 0:
            _tell(flags, cta, warp)


@cute.jit
def tell_of_part(left: cute.Pointer, flags: cute.Tensor, cta: Int32) -> None:
    """A warp's wait for all that a CTA leaves, so that no warp that multiplies waits for its stores to be seen."""
    cute.arch.mbarrier_wait(left, 0)
    thread, _, _ = cute.arch.thread_idx()
    if thread % 32 < 16:
        _tell(flags, cta, thread % 32)


@cute.jit
def _tell(flags: cute.Tensor, cta: Int32, warp: Int32) -> None:
    cute.arch.inline_ptx(
        "st.release.gpu.global.s32 [{$r0}], 1;",
        read_only_args=[flags.iterator.toint() + Int64((cta * 16 + warp) * 4)],
    )


@cute.jit
def add_parts(
    v: cutlass.Constexpr,
    sums: cute.Tensor,
    parts: cute.Tensor,
    flags: cute.Tensor,
    cta: Int32,
    before: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """The parts of the CTAs before this one, in their order from the nearest on; at most 32."""
    is_mine = lane < before
    flag = flags.iterator.toint() + Int64(((cta - 1 - lane) * 16 + warp) * 4)
    is_there = Int32(0)
    while is_there == 0:
        found = Int32(1)
        if is_mine:
            found = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag]
            )
        if cute.arch.vote_all_sync(found != 0):
            is_there = Int32(1)
    if is_mine:
        cute.arch.inline_ptx("st.relaxed.gpu.global.s32 [{$r0}], 0;", read_only_args=[flag])
    cute.arch.sync_warp()
    together = cutlass.const_expr(1 if v.tokens > 64 else 4)  # parts that are loaded at once: registers hold no more
    fours = cutlass.const_expr(min(2, v.tokens // 8))  # of each
    first = Int32(0)
    while first < before:
        for some in cutlass.range_constexpr(0, v.tokens // 8, fours):
            loaded = [
                [
                    _load_four(
                        _place_of(v, parts, cta - 1 - first - idx, warp, lane) + (some + four) * 512,
                        before - first - idx,
                    )
                    for four in range(fours)
                ]
                for idx in range(together)
            ]
            for idx in cutlass.range_constexpr(together):
                for four in cutlass.range_constexpr(fours):
                    for which in cutlass.range_constexpr(4):
                        sums[4 * (some + four) + which] += loaded[idx][four][which]
        first += together


@cute.jit
def _load_four(source: Int64, remaining: Int32):
    """Zeros where no part remains: no branch, so that all loads are under way together."""
    return cute.arch.inline_ptx(
        "{ .reg .pred some; setp.gt.s32 some, {$r1}, 0;"
        " mov.f32 {$w0}, 0f00000000; mov.f32 {$w1}, 0f00000000; mov.f32 {$w2}, 0f00000000; mov.f32 {$w3}, 0f00000000;"
        " @some ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[source, remaining],
    )


@cute.jit
def _place_of(v: cutlass.Constexpr, parts: cute.Tensor, cta: Int32, warp: Int32, lane: Int32):
    """Where the first four sums of a thread are left; the next are 512 bytes on."""
    return parts.iterator.toint() + Int64(cta * 16 + warp) * (v.tokens // 8 * 512) + lane * 16
