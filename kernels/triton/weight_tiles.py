"""Device functions: tiles of a narrow weight as the left operand of a matrix product, dequantised in registers.

A matrix unit wants of a row, from each of four threads, the elements 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of every 16, in
pairs of a register. The products of a step may be added up in any order, so the inputs of a tile change places: thread
c takes a quarter of a row of the tile, which are whole words of its bytes, and the elements of a word make up pairs as
masks bring them out. So no element changes threads. `in_order` moves the other operand's inputs accordingly.

bfloat16 holds every value: a code has two or four significant bits, an E4M3 scale four. A code's fields are put where
those of bfloat16 stand, as a number far below 1, and the multiplication with the scale brings it where it belongs. The
NVFP4 scale that is 2^126 times what is meant would not fit, so products are `UNIT` times what they should be.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

NVFP4_UNIT = tl.constexpr(2.0**-9)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_NVFP4_SCALE = tl.constexpr(2.0**117)  # what a scale is multiplied by: 2^126 UNIT
_E4M3_FIELDS = tl.constexpr(2.0**120)  # an E4M3 value by what its fields are in bfloat16

# A word of eight E2M1 codes to four pairs, codes j and j + 4 in pair j, each times its half of $5. A sign belongs in
# bit 15 of its half, the three bits of the size in bits 8 to 6: the products by 2^12 + 2^6 and by 2^8 + 2^2 put each
# where it belongs, and the code's other bits where the mask takes them away.
PAIRS_OF_E2M1 = tl.constexpr(
    """{ .reg .b32 a, v;
    and.b32 a, $4, 0x000F000F;
    mul.lo.u32 a, a, 4160;
    and.b32 a, a, 0x81C081C0;
    mul.bf16x2 $0, a, $5;
    and.b32 a, $4, 0x00F000F0;
    mul.lo.u32 a, a, 260;
    and.b32 a, a, 0x81C081C0;
    mul.bf16x2 $1, a, $5;
    shr.u32 v, $4, 8;
    and.b32 a, v, 0x000F000F;
    mul.lo.u32 a, a, 4160;
    and.b32 a, a, 0x81C081C0;
    mul.bf16x2 $2, a, $5;
    shr.u32 a, $4, 6;
    and.b32 a, a, 0x01C001C0;
    lop3.b32 a, $4, 0x80008000, a, 0xEA;  // $4 & mask | a
    mul.bf16x2 $3, a, $5; }"""
)
# A word of four E4M3 codes to two pairs, codes j and j + 2 in pair j, each times 2^120 and its half of $3: the two
# together would not always fit.
PAIRS_OF_E4M3 = tl.constexpr(
    """{ .reg .b32 a, b, c;
    mov.b32 c, 0x7B807B80;
    shl.b32 b, $2, 8;
    shl.b32 a, $2, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 a, b, 0x80008000, a, 0xEA;
    mul.bf16x2 a, a, c;
    mul.bf16x2 $0, a, $3;
    shr.u32 a, $2, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 a, $2, 0x80008000, a, 0xEA;
    mul.bf16x2 a, a, c;
    mul.bf16x2 $1, a, $3; }"""
)


@triton.jit
def in_order(matrix, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr):
    """The columns of a tile [ROWS, COLUMNS] of any matrix in the order of `nvfp4_tile` or `mxfp8_tile`."""
    if FORMAT == "nvfp4":  # thread, word, half, code of the half
        fields = tl.permute(tl.reshape(matrix, (ROWS, 4, COLUMNS // 32, 2, 2, 2)), (0, 2, 4, 5, 1, 3))
    else:
        fields = tl.permute(tl.reshape(matrix, (ROWS, 4, COLUMNS // 16, 2, 2)), (0, 2, 4, 1, 3))
    return tl.reshape(fields, (ROWS, COLUMNS))


@triton.jit
def _interpreted(codes, scale, SHIFT: tl.constexpr, SIZE_BITS: tl.constexpr, TO: tl.constexpr, FACTOR: tl.constexpr):
    """The code of SIZE_BITS and a sign that stands SHIFT bits up in every half of a word; its size goes TO bits up."""
    code = codes.to(tl.int32) >> SHIFT
    sign = (code & (1 << SIZE_BITS)) << (31 - SIZE_BITS)
    size = (code & ((1 << SIZE_BITS) - 1)) << TO
    return ((sign | size).to(tl.float32, bitcast=True) * FACTOR * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def nvfp4_factors(scale_bytes):
    """What `e2m1_pairs` multiplies by: E4M3 scales times 2^126 UNIT."""
    return (scale_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * _NVFP4_SCALE).to(tl.bfloat16)


@triton.jit
def ue8m0_factors(scale_bytes):
    """Scales of MXFP8 as bfloat16."""
    byte = scale_bytes.to(tl.int16)
    return tl.where(byte == 0, 0x40, byte << 7).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1_pairs(halves, scale):
    """The four codes of each int16, times its factor; neighbours of one result are a register."""
    if _INTERPRETED:
        p0 = _interpreted(halves, scale, 0, 3, 22, 1.0)
        p1 = _interpreted(halves, scale, 4, 3, 22, 1.0)
        p2 = _interpreted(halves, scale, 8, 3, 22, 1.0)
        p3 = _interpreted(halves, scale, 12, 3, 22, 1.0)
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            PAIRS_OF_E2M1,
            "=r,=r,=r,=r,r,r",
            [halves, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return p0, p1, p2, p3


@triton.jit
def e4m3_pairs(halves, scale):
    """The two codes of each int16, times its factor. They are numbers: the code of NaN is taken for 480."""
    if _INTERPRETED:
        p0 = _interpreted(halves, scale, 0, 7, 20, _E4M3_FIELDS)
        p1 = _interpreted(halves, scale, 8, 7, 20, _E4M3_FIELDS)
    else:
        p0, p1 = tl.inline_asm_elementwise(
            PAIRS_OF_E4M3,
            "=r,=r,r,r",
            [halves, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return p0, p1


@triton.jit
def nvfp4_tile(halves, scale_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """UNIT times the values of codes in fours [ROWS, COLUMNS / 4] int16 with E4M3 scale bytes [ROWS, COLUMNS / 16].

    The global scale isn't in them.
    """
    scale = tl.broadcast_to(nvfp4_factors(scale_bytes)[:, :, None], (ROWS, COLUMNS // 16, 4))
    p0, p1, p2, p3 = e2m1_pairs(halves, tl.reshape(scale, (ROWS, COLUMNS // 4)))
    codes = tl.join(tl.join(p0, p2), tl.join(p1, p3))
    return in_order(tl.reshape(codes, (ROWS, COLUMNS)), ROWS, COLUMNS, "nvfp4")


@triton.jit
def mxfp8_tile(halves, scale_bytes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The values of codes in twos [ROWS, COLUMNS / 2] int16 with UE8M0 scale bytes [ROWS, COLUMNS / 32]."""
    scale = tl.broadcast_to(ue8m0_factors(scale_bytes)[:, :, None], (ROWS, COLUMNS // 32, 16))
    p0, p1 = e4m3_pairs(halves, tl.reshape(scale, (ROWS, COLUMNS // 2)))
    return in_order(tl.reshape(tl.join(p0, p1), (ROWS, COLUMNS)), ROWS, COLUMNS, "mxfp8")
