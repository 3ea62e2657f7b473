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
_PUSH_SHARE = tl.constexpr("""
{
.reg .pred q;
.reg .u32 t, word;
.reg .u64 a;
mov.u32 t, %tid.x;
setp.lt.u32 q, t, $4;
and.b32 word, t, $5;
setp.eq.and.u32 q, word, $3, q;
mul.wide.u32 a, t, 4;
add.u64 a, a, $1;
@q st.relaxed.gpu.global.b32 [a], $2;
mov.b32 $0, 0;
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


@triton.constexpr_function
def _settle_text(count):
    """Rounds, in which what hasn't arrived at `count` addresses is read again, until all has."""
    text, looks, loads = "{ .reg .pred any;", "", ""
    for idx in range(count):
        words = [f"${4 * idx + word}" for word in range(4)]
        text += f".reg .pred p{idx};"
        text += "".join(f"mov.b32 {word}, ${5 * count + 4 * idx + at};" for at, word in enumerate(words))
        looks += f"setp.eq.u32 p{idx}, {words[0]}, 0x80000000;"
        looks += "".join(f"setp.eq.or.u32 p{idx}, {word}, 0x80000000, p{idx};" for word in words[1:])
        looks += f"or.pred any, any, p{idx};" if idx else "mov.pred any, p0;"
        loads += f"@p{idx} ld.relaxed.sys.global.v4.b32 {{{', '.join(words)}}}, [${4 * count + idx}];"
    return f"{text} again: {looks} @!any bra done; {loads} bra again; done: }}"


@triton.constexpr_function
def _settle_operands(count):
    return ",".join(["=&r"] * (4 * count) + ["l"] * count + ["r"] * (4 * count))


@triton.constexpr_function
def _settle_types(count):
    return (tl.int32,) * (4 * count)


@triton.jit
def settle_words(addresses, words, COUNT: tl.constexpr):
    """`words` were peeked, four at each of COUNT addresses: read what is missing again until all have arrived."""
    return tl.inline_asm_elementwise(
        _settle_text(COUNT),
        _settle_operands(COUNT),
        addresses + words,
        dtype=_settle_types(COUNT),
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
    elif tl.bfloat16 == DTYPE:
        low = (row << 16).to(tl.float32, bitcast=True)
        elements = tl.join(low, (row & -0x10000).to(tl.float32, bitcast=True))
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


@triton.jit
def share_squares(address, squares, part, PARTS: tl.constexpr):
    """The sum over the PARTS programs of a row, each of which has its own, added up as kernels/triton/rms_norm does.

    Each program has a quad at `address`, into which all write; the caller clears its own when all threads have read it.
    """
    word = squares.to(tl.int32, bitcast=True)
    tl.inline_asm_elementwise(
        _PUSH_SHARE,
        "=r,l,r,r,r,r",
        [address, word, part, tl.cast(4 * PARTS, tl.int32), tl.cast(PARTS - 1, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    words = await_quad(address + part * 16)
    first, second = words[0].to(tl.float32, bitcast=True), words[1].to(tl.float32, bitcast=True)
    if PARTS == 4:
        first += words[2].to(tl.float32, bitcast=True)
        second += words[3].to(tl.float32, bitcast=True)
    return first + second
