"""Copies of 16 bytes and of matrices of 8 x 8 that a tensor's layout can't say: rows come from a table."""

import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def copy_async(target: Int32, source: Int64) -> None:
    """16 bytes from global to shared memory, past the first cache."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16;",
        read_only_args=[target, source],
    )


@cute.jit
def arrive_when_copied(barrier: cute.Pointer) -> None:
    """This thread arrives at a barrier once its copies before have ended."""
    cute.arch.inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier.toint()])


@cute.jit
def store_transposed(target: Int32, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """Four matrices of 8 x 8 numbers of 16 bits; lane 8 q + r names where column r of matrix q goes."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target, a, b, c, d],
    )


@cute.jit
def move_16_bytes(target: Int64, source: Int32) -> None:
    """From shared to global memory."""
    a, b, c, d = load_four(source)
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target, a, b, c, d],
    )


@cute.jit
def load_four(source: Int32):
    """Four numbers of 32 bits from shared memory, at a multiple of 16 bytes."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[source],
    )
