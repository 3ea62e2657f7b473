"""Device functions of the narrow formats, for the quantise kernels and the epilogues of others.

An epilogue rounds its value to the activation dtype first and hands over what it rounded: then its bytes equal those of
a quantise kernel that reads the stored value. It calls `store_row` on a row or a part of one, such as a head, or
`store_blocks` on blocks of several; `num_zeroing_programs` programs more call `zero_invented_rows`. FORMAT is a
QuantFormat's value; `scale` points at the scale of FP8 or the global scale of NVFP4, and is None otherwise.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SIXTH = tl.constexpr(0.16666667163372040)  # rcp.approx.ftz(6), 0x3E2AAAAB
_INVERSE_448 = tl.constexpr(0.0022321429569274187)  # rcp.approx.ftz(448), 0x3B124925
_SMALLEST_AMAX = tl.constexpr(1e-10)  # of an FP8 block
_TINY = tl.constexpr(1.1754943508222875e-38)
_ZEROED_WORDS = tl.constexpr(1024)  # by one call of zero_invented_rows: eight tiles

# Eight float32 x and a multiplier for each pair to eight E2M1 codes, even elements in the low nibbles. The code of
# a = |x| m before it is rounded is the least of 2 a, a + 2, a / 2 + 4 and 7. Rounding keeps order, so each is rounded
# by itself, in an addition that leaves an integer in the low bits, as that of 2^23 does. The first two in one: steps of
# float32 are 1/2 below 2^23 and 1 above, so the bits of a + 2^23 - 2 are those of 2^23 and the code, less 4. NaN as
# bits is above all of them, and becomes 7.
_ONE_CODE = """
    abs.f32 a, {x};
    mul.rn.f32 a, a, {multiplier};
    add.rn.f32 s, a, 0f4AFFFFFC;
    fma.rn.f32 a, a, 0f3F000000, 0f4B000000;
    mov.b32 b{idx}, s;
    mov.b32 t0, a;
    min.s32 b{idx}, b{idx}, t0;
    min.s32 b{idx}, b{idx}, 0x4B000003;
"""
_ZERO_CODES = 0x4AFFFFFC * 0x11111111  # the sum below of eight codes that are 0
_PACK_E2M1 = tl.constexpr(
    "{ .reg .f32 a, s; .reg .b32 b<8>, t<4>;"
    # $1 to $4 are the even elements, $5 to $8 the odd ones, $9 to $12 the multipliers of the pairs
    + "".join(_ONE_CODE.format(x=f"${1 + idx}", multiplier=f"${9 + idx % 4}", idx=idx) for idx in range(8))
    + "".join(f"mad.lo.u32 b{idx}, b{idx + 4}, 16, b{idx};" for idx in range(4))
    + f"""
    mad.lo.u32 b0, b1, 256, b0;
    mad.lo.u32 b2, b3, 256, b2;
    mad.lo.u32 b0, b2, 65536, b0;
    add.u32 b0, b0, {-_ZERO_CODES % 2**32};
    prmt.b32 t0, $1, $2, 0x00FB;  // a selector of 8 + n spreads the sign of byte n
    prmt.b32 t1, $3, $4, 0x00FB;
    prmt.b32 t0, t0, t1, 0x5410;
    prmt.b32 t2, $5, $6, 0x00FB;
    prmt.b32 t3, $7, $8, 0x00FB;
    prmt.b32 t2, t2, t3, 0x5410;
    lop3.b32 b0, t0, 0x08080808, b0, 0xEA;  // t & mask | b
    lop3.b32 $0, t2, 0x80808080, b0, 0xEA; }}"""
)


@triton.constexpr_function
def block_len(quant_format):
    """Elements that share a scale."""
    return {"nvfp4": 16, "nvfp4_linear": 16, "fp8_block128": 128}.get(quant_format, 32)


@triton.jit
def reciprocal(x):
    """rcp.approx.ftz.f32."""
    if _INTERPRETED:
        flushed = tl.where(tl.abs(x) < _TINY, x * 0, x)
        inverse = 1 / flushed
        inverse = tl.where(tl.abs(inverse) < _TINY, inverse * 0, inverse)
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return inverse


@triton.jit
def to_e4m3(x):
    """Nearest E4M3, ties to even, saturating; NaN is 0x7F."""
    if _INTERPRETED:
        x = tl.where(x != x, float("nan"), x)
    return x.to(tl.float8e4nv)


@triton.jit
def larger_size(a, b):
    """The larger of |a| and |b|, or NaN, in one instruction: tl.abs would be one more for each."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 p, q; abs.f32 p, $1; abs.f32 q, $2; max.NaN.f32 $0, p, q; }",
        "=f,f,f",
        [a, b],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def block_amax(blocks):
    """The largest |x| of each row of float32 [N, BLOCK]; NaN if one is NaN."""
    if _INTERPRETED:
        bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # those of NaN are above infinity's
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    else:
        amax = tl.reduce(blocks, 1, larger_size)
    return amax


@triton.jit
def pack_e2m1(even, odd, multiplier):
    """Bytes of the two E2M1 codes nearest to even * multiplier, in the low nibble, and odd * multiplier.

    Ties go to the even code, a size of NaN is 6, the sign is that of x. A multiplier is not negative.
    """
    if _INTERPRETED:
        packed = _e2m1_code(even, multiplier) | (_e2m1_code(odd, multiplier) << 4)
    else:
        packed = tl.inline_asm_elementwise(
            _PACK_E2M1,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [even, odd, multiplier],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return packed


@triton.jit
def _e2m1_code(x, multiplier):
    product = x * multiplier
    size = tl.where(product != product, 6.0, tl.minimum(tl.abs(product), 6.0))
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    rounded = (size / step + 8388608.0) - 8388608.0  # 2^23: to an integer, ties to even
    code = rounded + tl.where(size < 2, 0.0, tl.where(size < 4, 2.0, 4.0))
    sign = (x.to(tl.int32, bitcast=True) >> 28) & 8
    return (code.to(tl.int32) | sign).to(tl.uint8)


@triton.jit
def nearest_e4m3(x):
    """The value of `to_e4m3` of x >= 0 in float32, by arithmetic.

    ptxas 12.8 reads a wrong register where a thread packs four fresh E4M3 codes into a word and also reads them back.
    """
    size = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    # above 2^20 size float32 are as far apart as E4M3 are at size, but no nearer than above 2^14: 2^-9
    large = tl.maximum(exponent + 0x0A000000, 0x46800000).to(tl.float32, bitcast=True)
    return (size + large) - large  # no product with an addition, of which the compiler would make one rounding


@triton.jit
def encode_nvfp4(blocks, amax, global_scale, NUM_BLOCKS: tl.constexpr):
    """[N, 16] in float32 and their amax [N] to packed codes [N, 8] and E4M3 scale bytes [N]."""
    exact = global_scale * (amax * _SIXTH)
    scale = nearest_e4m3(exact)
    multiplier = tl.where(scale == 0, 0.0, reciprocal(scale * reciprocal(global_scale)))
    pairs = tl.reshape(blocks, (NUM_BLOCKS, 8, 2))
    even, odd = tl.split(pairs)
    _, multipliers = tl.broadcast(pairs, multiplier[:, None, None])  # split as the values are: nothing changes threads
    multipliers, _ = tl.split(multipliers)
    return pack_e2m1(even, odd, multipliers), to_e4m3(exact).to(tl.uint8, bitcast=True)


@triton.jit
def encode_mxfp8(blocks, amax):
    """[N, 32] in float32 and their amax [N] to E4M3 [N, 32] and UE8M0 scale bytes [N]."""
    bits = (amax * _INVERSE_448).to(tl.uint32, bitcast=True)
    up = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    scale = tl.where(bits <= 0x400000, 0, up).to(tl.int32)  # byte 0 is 2^-127
    # the reciprocal of a power of two as rcp.approx.ftz gives it: infinite for 2^-127, 0 for 2^127
    inverse = tl.where(scale == 0, 255, 254 - scale) << 23
    multiplier = tl.where(amax == 0, 0, inverse).to(tl.float32, bitcast=True)
    return to_e4m3(blocks * multiplier[:, None]), scale.to(tl.uint8)


@triton.jit
def encode_fp8_blocks(blocks):
    """[N, 128] to E4M3 [N, 128] and float32 scales [N]."""
    wide = blocks.to(tl.float32)
    return encode_scaled_fp8(wide, block_amax(wide))


@triton.jit
def encode_scaled_fp8(blocks, amax):
    """[N, BLOCK] in float32 and their amax [N] to E4M3 [N, BLOCK] and float32 scales [N]."""
    scale = tl.maximum(amax, _SMALLEST_AMAX, propagate_nan=tl.PropagateNan.ALL) * _INVERSE_448
    return to_e4m3(blocks * tl.div_rn(1.0, scale)[:, None]), scale


@triton.jit
def encode_fp8(values, scale):
    """Any shape to E4M3; `scale` points at one float32."""
    return to_e4m3(values.to(tl.float32) * tl.div_rn(1.0, tl.load(scale)))


@triton.jit
def scale_offset(row, block, blocks_per_row, FORMAT: tl.constexpr):
    """Where the scale of a row's block stands: a term that is the same for the whole row, and one of the block."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp8":
        of_row = (row >> 7) * (blocks_per_row // 4 * 512) + (row & 31) * 16 + ((row >> 5) & 3) * 4
        offset = of_row + ((block >> 2) * 512 + (block & 3))
    else:
        offset = row * blocks_per_row + block
    return offset


@triton.jit
def encode(blocks, scale, FORMAT: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Data and scales of blocks [N, block_len]; `scale` points at the global scale of NVFP4."""
    global_scale = 1.0
    if scale is not None:
        global_scale = tl.load(scale)
    wide = blocks.to(tl.float32)
    return encode_wide(wide, block_amax(wide), global_scale, FORMAT, NUM_BLOCKS)


@triton.jit
def encode_wide(blocks, amax, global_scale, FORMAT: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """`encode` of float32 whose amax [N] and global scale are there."""
    if FORMAT == "nvfp4" or FORMAT == "nvfp4_linear":
        encoded, stored = encode_nvfp4(blocks, amax, global_scale, NUM_BLOCKS)
    elif FORMAT == "mxfp8" or FORMAT == "mxfp8_linear":
        encoded, stored = encode_mxfp8(blocks, amax)
    else:
        encoded, stored = encode_scaled_fp8(blocks, amax)
    return encoded, stored


@triton.jit
def store_data(encoded, at, is_real, data, FORMAT: tl.constexpr):
    """Store what `encode` made as the blocks number `at` [N] of the matrix."""
    BLOCK_BYTES: tl.constexpr = 8 if block_len(FORMAT) == 16 else block_len(FORMAT)
    byte = tl.arange(0, BLOCK_BYTES)[None, :]
    tl.store(data + at[:, None] * BLOCK_BYTES + byte, encoded, mask=is_real[:, None])


@triton.jit
def store_blocks(
    blocks,
    row,
    block,
    is_real,
    data,
    scales,
    scale,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Quantise `blocks` [N, block_len] and store data and scales: blocks number `block` [N] of rows `row` [N] or one.

    Not for "fp8", which has no blocks. `row` is int64 where data has 2^31 elements or more.
    """
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // block_len(FORMAT)
    encoded, stored = encode(blocks, scale, FORMAT, NUM_BLOCKS)
    store_data(encoded, row * BLOCKS_PER_ROW + block, is_real, data, FORMAT)
    tl.store(scales + scale_offset(row, block, BLOCKS_PER_ROW, FORMAT), stored, mask=is_real)


@triton.jit
def store_row(
    values, row, data, scales, scale, WIDTH: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, first_column=0
):
    """Quantise `values` [COLUMNS] and store them as columns from `first_column` of row `row`; those from WIDTH are not.

    A block must not be cut: COLUMNS and first_column are multiples of its length, and "fp8_rows" takes a whole row,
    zero from WIDTH.
    """
    if FORMAT == "fp8" or FORMAT == "fp8_rows":
        if FORMAT == "fp8":
            encoded = encode_fp8(values, scale)
        else:
            encoded, stored = encode_fp8_blocks(tl.reshape(values, (1, COLUMNS)))
            tl.store(scales + row + tl.arange(0, 1), stored)
        # Another shape than the caller's: a store of bytes would widen the layout in which it adds up a row
        WIDE: tl.constexpr = min(COLUMNS, 16)
        column = first_column + tl.arange(0, COLUMNS // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        tl.store(data + row * WIDTH + column, tl.reshape(encoded, (COLUMNS // WIDE, WIDE)), mask=column < WIDTH)
    else:
        BLOCK: tl.constexpr = block_len(FORMAT)
        NUM_BLOCKS: tl.constexpr = COLUMNS // BLOCK
        block = first_column // BLOCK + tl.arange(0, NUM_BLOCKS)
        blocks = tl.reshape(values, (NUM_BLOCKS, BLOCK))
        store_blocks(blocks, row, block, block < WIDTH // BLOCK, data, scales, scale, WIDTH, FORMAT, NUM_BLOCKS)


@triton.jit
def zero_invented_rows(scales, num_rows, program, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Zero the scales of rows that don't exist, in the group of tiles number `program`.

    Only for swizzled formats where 128 doesn't divide num_rows; there are `num_zeroing_programs` groups.
    """
    TILES: tl.constexpr = WIDTH // block_len(FORMAT) // 4
    word = tl.arange(0, _ZEROED_WORDS)  # of 4 bytes: the scales of one row in a tile
    tile = program * (_ZEROED_WORDS // 128) + word // 128
    row_tile = num_rows // 128
    row = row_tile * 128 + word % 128 // 4 + word % 4 * 32
    words = scales.to(tl.pointer_type(tl.int32)) + (row_tile * TILES + tile) * 128 + word % 128
    tl.store(words, tl.zeros((_ZEROED_WORDS,), tl.int32), mask=(row >= num_rows) & (tile < TILES))


# Four bytes of two E2M1 codes to four E4M3 bytes of the low and of the high nibbles, each 2^-6 of its value: there
# the fields of E2M1 stand in those of E4M3.
_SPREAD_E2M1 = tl.constexpr(
    """{ .reg .b32 m, s;
    shl.b32 m, $2, 2;
    shl.b32 s, $2, 4;
    and.b32 s, s, 0x80808080;
    lop3.b32 $0, m, 0x1C1C1C1C, s, 0xEA;
    shr.u32 m, $2, 2;
    and.b32 s, $2, 0x80808080;
    lop3.b32 $1, m, 0x1C1C1C1C, s, 0xEA; }"""
)


@triton.jit
def spread_e2m1(codes):
    """The codes of the low and of the high nibbles of bytes as E4M3, each 2^-6 of its value."""
    if _INTERPRETED:
        low = ((codes << 2) & 0x1C) | ((codes << 4) & 0x80)
        high = ((codes >> 2) & 0x1C) | (codes & 0x80)
    else:
        low, high = tl.inline_asm_elementwise(
            _SPREAD_E2M1, "=r,=r,r", [codes], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def ue8m0_value(scale_bytes):
    """2^(b - 127) in float32."""
    bits = scale_bytes.to(tl.int32)
    return tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)


def num_zeroing_programs(rows: int, blocks: int, *, swizzled: bool) -> int:
    """How many calls of `zero_invented_rows` cover the invented rows of scales with `blocks` blocks a row."""
    return -(-blocks // 4 // (_ZEROED_WORDS.value // 128)) if swizzled and rows % 128 else 0
