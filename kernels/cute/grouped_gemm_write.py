"""What becomes of the sums of a grouped product: activation, rounding, and rows of channels in global memory."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute.grouped_gemm_parts import PASS, PASS_BYTES, STEP
from dist_infer.kernels.cute.moe_copies import move_16_bytes, store_transposed


@cute.jit
def write(
    v: cutlass.Constexpr,
    values: cute.Tensor,
    factors: Any,
    buffer: Int32,
    rows: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    channel: Int32,
    channels: Int32,
    thread: Int32,
    group: Int32,
    move: cutlass.Constexpr = move_16_bytes,
) -> None:
    """64 channels of all pairs of a tile, rounded and turned so that a pair's channels stand together.

    `move` stores 16 bytes of a row: it is told where to, and where they are in shared memory.
    A thread's value i + 2 h + 4 j is of channel 16 warp + lane / 4 + 8 h and pair 8 j + 2 (lane % 4) + i.
    """
    warp, lane = thread // 32, thread % 32
    chunk = warp * 2 + lane // 8 % 2
    own = lane % 8 + lane // 16 * 8
    to_shared = buffer + own * 128 + (chunk ^ (own % 8)) * 16
    out_chunk, out_pair = thread % 8, thread // 8
    from_shared = buffer + out_pair * 128 + (out_chunk ^ (out_pair % 8)) * 16
    out_channel = channel + out_chunk * 8
    row_bytes = out.stride[0] * 2
    target = out.iterator.toint() + Int64(out_channel * 2)
    cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)  # what was written before has been read
    for turn in cutlass.range_constexpr((v.pairs + PASS - 1) // PASS):
        if turn * PASS < count:
            place = cutlass.const_expr(turn % v.num_passes * PASS_BYTES)
            halves = cutlass.const_expr(min(2, (v.pairs - turn * PASS) // STEP))
            for half in cutlass.range_constexpr(halves):
                at = cutlass.const_expr((turn * PASS + half * STEP) // 2)
                store_transposed(
                    to_shared + place + half * (STEP * 128),
                    *(packed(v, values, factors, at + 2 * idx) for idx in range(4)),
                )
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            for half in cutlass.range_constexpr(halves):
                pair = turn * PASS + half * STEP + out_pair
                if pair < count and out_channel < channels:
                    row = rows[turn * (PASS // STEP) + half]
                    move(target + Int64(row) * row_bytes, from_shared + place + half * (STEP * 128))


@cute.jit
def packed(v: cutlass.Constexpr, values: cute.Tensor, factors: Any, at: cutlass.Constexpr) -> Int32:
    """Two values, or what the activation makes of them and factors, as one register."""
    pair = cute.make_rmem_tensor(cute.make_layout(2), v.number)
    for idx in cutlass.range_constexpr(2):
        value = values[at + idx]
        if cutlass.const_expr(factors is not None):
            value = gated(v, value, factors[at + idx])
        pair[idx] = value.to(v.number)
    return cute.recast_tensor(pair, Int32)[0]


@cute.jit
def gated(v: cutlass.Constexpr, gate: Float32, up: Float32) -> Float32:
    """What the activation makes of a gate and an up."""
    if cutlass.const_expr(v.activation is GatedActivation.SILU):
        result = gate * _sigmoid(gate) * up
    else:
        if gate > 7.0:
            gate = Float32(7.0)
        if up > 7.0:
            up = Float32(7.0)
        if up < -7.0:
            up = Float32(-7.0)
        result = gate * _sigmoid(gate * 1.702) * (up + 1.0)
    return result


@cute.jit
def _sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -math.log2(math.e), fastmath=True))
