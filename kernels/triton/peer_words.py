"""Device functions on memory that other GPUs map: rows as 32-bit words, 16 bytes a lane and access.

A lane's address is an int64. `wanted` masks lanes: what isn't wanted is read as 0 and never written. Data that is its
own flag: a word that holds SENTINEL has not arrived yet. That is -0.0 in float32, and (0.0, -0.0) in a pair of 16-bit
floats; no sum that starts at +0.0 depends on the sign of a zero, so senders send 0 in its place.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.all_reduce import SENTINEL

_SENTINEL = tl.constexpr(SENTINEL)
_LOAD = tl.constexpr("""
{
.reg .pred q;
setp.ne.s32 q, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@q ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_PEEK = tl.constexpr("""
{
.reg .pred q;
setp.ne.s32 q, $5, 0;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
@q ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
}""")
_SETTLE = tl.constexpr("""
{
.reg .pred p;
mov.b32 $0, $5; mov.b32 $1, $6; mov.b32 $2, $7; mov.b32 $3, $8;
again:
setp.eq.u32 p, $0, 0x80000000;
setp.eq.or.u32 p, $1, 0x80000000, p;
setp.eq.or.u32 p, $2, 0x80000000, p;
setp.eq.or.u32 p, $3, 0x80000000, p;
@!p bra done;
ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
bra again;
done:
}""")
_PUSH = tl.constexpr("""
{
.reg .pred q;
setp.ne.s32 q, $2, 0;
@q st.relaxed.sys.global.v4.b32 [$1], {$3, $4, $5, $6};
mov.b32 $0, 0;
}""")
_PUBLISH = tl.constexpr("""
{
.reg .pred q;
.reg .u32 t;
mov.u32 t, %tid.x;
setp.eq.u32 q, t, 0;
@q st.release.sys.global.u32 [$1], $2;
mov.b32 $0, 0;
}""")
_AWAIT = tl.constexpr("""
{
.reg .pred p;
.reg .u32 t;
mov.u32 t, %tid.x;
setp.ne.u32 p, t, 0;
@p bra done;
again:
ld.acquire.sys.global.u32 t, [$1];
setp.ne.u32 p, t, $2;
@p bra again;
done:
mov.b32 $0, 0;
}""")
_PUSH_QUAD = tl.constexpr("""
{
.reg .pred q;
.reg .u32 t;
mov.u32 t, %tid.x;
setp.eq.u32 q, t, 0;
@q st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5};
mov.b32 $0, 0;
}""")
_AWAIT_QUAD = tl.constexpr("""
{
.reg .pred p;
again:
ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];
setp.eq.u32 p, $0, 0x80000000;
setp.eq.or.u32 p, $1, 0x80000000, p;
setp.eq.or.u32 p, $2, 0x80000000, p;
setp.eq.or.u32 p, $3, 0x80000000, p;
@p bra again;
}""")
_FOUR = tl.constexpr((tl.int32, tl.int32, tl.int32, tl.int32))


@triton.jit
def load_words(address, wanted):
    """The four words at each address, of memory that only this device writes."""
    return tl.inline_asm_elementwise(
        _LOAD, "=&r,=&r,=&r,=&r,l,r", [address, wanted.to(tl.int32)], dtype=_FOUR, is_pure=False, pack=1
    )


@triton.jit
def peek_words(address, wanted):
    """The four words at each address as they are now, whatever a peer is writing there."""
    return tl.inline_asm_elementwise(
        _PEEK, "=&r,=&r,=&r,=&r,l,r", [address, wanted.to(tl.int32)], dtype=_FOUR, is_pure=False, pack=1
    )


@triton.jit
def settle_words(address, words):
    """`words` were peeked: read them again until all four have arrived."""
    return tl.inline_asm_elementwise(
        _SETTLE,
        "=&r,=&r,=&r,=&r,l,r,r,r,r",
        [address, words[0], words[1], words[2], words[3]],
        dtype=_FOUR,
        is_pure=False,
        pack=1,
    )


@triton.jit
def push_words(address, wanted, words):
    """Write four words to each address, of this device or a peer."""
    tl.inline_asm_elementwise(
        _PUSH,
        "=r,l,r,r,r,r,r",
        [address, wanted.to(tl.int32), words[0], words[1], words[2], words[3]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def clear_words(address, wanted):
    """Mark what lies at each address as not arrived."""
    empty = tl.full(address.shape, _SENTINEL, tl.int32)
    push_words(address, wanted, (empty, empty, empty, empty))


@triton.jit
def sendable(word):
    """The word, with the one value that can't be sent replaced by one of the same sum."""
    return tl.where(word == _SENTINEL, 0, word)


@triton.jit
def publish(address, value):
    """Set a flag after everything that this program has written before."""
    tl.debug_barrier()
    tl.inline_asm_elementwise(_PUBLISH, "=r,l,r", [address, value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_flag(address, value):
    """Wait until a flag has this value; what was written before it was set is then there to be read."""
    tl.inline_asm_elementwise(_AWAIT, "=r,l,r", [address, value], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def unpack_row(words, DTYPE: tl.constexpr):
    """The elements of a row in order, in float32.

    Shapes: four of [V] -> [8 V], or [4 V] for float32.
    """
    row = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))  # [V, 2, 2]: word 2 i + j at [i, j]
    if tl.float32 == DTYPE:
        elements = row.to(tl.float32, bitcast=True)
    else:
        low = (row & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (row >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        elements = tl.join(low, high).to(tl.float32)
    return tl.reshape(elements, [elements.numel])


@triton.jit
def push_quad(address, word_0, word_1):
    """Two words and two zeros to one address, which is the whole program's."""
    zero = word_0 * 0
    tl.inline_asm_elementwise(
        _PUSH_QUAD, "=r,l,r,r,r,r", [address, word_0, word_1, zero, zero], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_quad(address):
    """The four words at one address, which is the whole program's, once they have arrived."""
    return tl.inline_asm_elementwise(_AWAIT_QUAD, "=&r,=&r,=&r,=&r,l", [address], dtype=_FOUR, is_pure=False, pack=1)


@triton.jit
def clear_quad(address):
    """Mark the four words at one address as not arrived, when all threads have read them."""
    empty = tl.cast(_SENTINEL, tl.int32)
    tl.inline_asm_elementwise(
        _PUSH_QUAD, "=r,l,r,r,r,r", [address, empty, empty, empty, empty], dtype=tl.int32, is_pure=False, pack=1
    )
