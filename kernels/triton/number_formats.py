"""Device functions of the narrow formats, for the quantise kernels and the epilogues of others.

An epilogue rounds its value to the activation dtype first and hands over what it rounded: then its bytes equal those of
a quantise kernel that reads the stored value. It calls `store_row` on a row, or `store_blocks` on blocks of several,
and one program a group of scale tiles calls `zero_invented_rows` (only where `has_invented_rows`). FORMAT is a
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

# Eight float32 to eight E2M1 codes, the even elements in the low nibbles. With a = min(|x|, 6), which is 6 for NaN, a
# code is the sum of three roundings to integers, each done by adding 2^23:
# 4 sat(a / 2) are halves up to 2; 2 sat(a / 2 - 1) ones from 2 to 4; sat(a / 2 - 2) twos from 4 to 6.
# What has been added before is even wherever the next term isn't 0, so ties still go to the even code.
_ONE_CODE = """
    abs.f32 a, {source};
    min.f32 a, a, 0f40C00000;
    mul.rn.sat.f32 s, a, 0f3F000000;
    fma.rn.f32 {code}, s, 0f40800000, 0f4B000000;
    fma.rn.sat.f32 s, a, 0f3F000000, 0fBF800000;
    fma.rn.f32 {code}, s, 0f40000000, {code};
    fma.rn.sat.f32 s, a, 0f3F000000, 0fC0000000;
    add.rn.f32 {code}, {code}, s;
    mov.b32 b{idx}, {code};
"""
_PACK_E2M1 = tl.constexpr(
    "{ .reg .f32 a, s, c; .reg .b32 b<8>, t<8>;"
    + "".join(_ONE_CODE.format(source=f"${1 + idx}", code="c", idx=idx) for idx in range(8))
    # b0 to b3 are the even elements' codes, b4 to b7 the odd ones'
    + "".join(f"mad.lo.u32 b{idx}, b{idx + 4}, 16, b{idx};" for idx in range(4))
    + """
    prmt.b32 b0, b0, b1, 0x0040;
    prmt.b32 b2, b2, b3, 0x0040;
    prmt.b32 b0, b0, b2, 0x5410;
    prmt.b32 t0, $1, $2, 0x00FB;  // a selector of 8 + n spreads the sign of byte n
    prmt.b32 t1, $3, $4, 0x00FB;
    prmt.b32 t0, t0, t1, 0x5410;
    prmt.b32 t2, $5, $6, 0x00FB;
    prmt.b32 t3, $7, $8, 0x00FB;
    prmt.b32 t2, t2, t3, 0x5410;
    lop3.b32 b0, t0, 0x08080808, b0, 0xEA;  // t & mask | b
    lop3.b32 $0, t2, 0x80808080, b0, 0xEA; }"""
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
def block_amax(blocks):
    """The largest |x| of each row of float32 [N, BLOCK]; NaN if one is NaN, whose bits are above infinity's."""
    bits = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def pack_e2m1(even, odd):
    """float32 to bytes of two E2M1 codes, nearest, ties to even: `even` in the low nibbles."""
    if _INTERPRETED:
        packed = _e2m1_code(even) | (_e2m1_code(odd) << 4)
    else:
        packed = tl.inline_asm_elementwise(
            _PACK_E2M1, "=r,r,r,r,r,r,r,r,r", [even, odd], dtype=tl.uint8, is_pure=True, pack=4
        )
    return packed


@triton.jit
def _e2m1_code(x):
    size = tl.where(x != x, 6.0, tl.minimum(tl.abs(x), 6.0))
    step = tl.where(size < 2, 0.5, tl.where(size < 4, 1.0, 2.0))
    rounded = (size / step + 8388608.0) - 8388608.0  # 2^23: to an integer, ties to even
    code = rounded + tl.where(size < 2, 0.0, tl.where(size < 4, 2.0, 4.0))
    sign = tl.where(x != x, 0, (x.to(tl.int32, bitcast=True) >> 28) & 8)
    return (code.to(tl.int32) | sign).to(tl.uint8)


@triton.jit
def encode_nvfp4(blocks, global_scale, NUM_BLOCKS: tl.constexpr):
    """[N, 16] to packed codes [N, 8] and E4M3 scale bytes [N]."""
    wide = blocks.to(tl.float32)
    stored = to_e4m3(global_scale * (block_amax(wide) * _SIXTH))
    scale = stored.to(tl.float32)
    multiplier = tl.where(scale == 0, 0.0, reciprocal(scale * reciprocal(global_scale)))
    even, odd = tl.split(tl.reshape(wide * multiplier[:, None], (NUM_BLOCKS, 8, 2)))
    return pack_e2m1(even, odd), stored.to(tl.uint8, bitcast=True)


@triton.jit
def encode_mxfp8(blocks):
    """[N, 32] to E4M3 [N, 32] and UE8M0 scale bytes [N]."""
    wide = blocks.to(tl.float32)
    amax = block_amax(wide)
    bits = (amax * _INVERSE_448).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    up = tl.where(exponent == 0, mantissa > 0x400000, mantissa != 0)  # byte 0 is 2^-127
    scale = tl.minimum(exponent + up.to(tl.int32), 254)
    # the reciprocal of a power of two as rcp.approx.ftz gives it: infinite for 2^-127, 0 for 2^127
    inverse = tl.where(scale == 0, 255, 254 - scale) << 23
    multiplier = tl.where(amax == 0, 0, inverse).to(tl.float32, bitcast=True)
    return to_e4m3(wide * multiplier[:, None]), scale.to(tl.uint8)


@triton.jit
def encode_fp8_blocks(blocks):
    """[N, 128] to E4M3 [N, 128] and float32 scales [N]."""
    wide = blocks.to(tl.float32)
    scale = tl.maximum(block_amax(wide), _SMALLEST_AMAX, propagate_nan=tl.PropagateNan.ALL) * _INVERSE_448
    return to_e4m3(wide * tl.div_rn(1.0, scale)[:, None]), scale


@triton.jit
def encode_fp8(values, scale):
    """Any shape to E4M3; `scale` points at one float32."""
    return to_e4m3(values.to(tl.float32) * tl.div_rn(1.0, tl.load(scale)))


@triton.jit
def scale_offset(row, block, blocks_per_row, FORMAT: tl.constexpr):
    """Where the scale of a row's block stands."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp8":
        tile = (row // 128) * (blocks_per_row // 4) + block // 4
        offset = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
    else:
        offset = row * blocks_per_row + block
    return offset


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
    BLOCK: tl.constexpr = block_len(FORMAT)
    BLOCK_BYTES: tl.constexpr = 8 if BLOCK == 16 else BLOCK
    if BLOCK == 16:
        global_scale = 1.0 if scale is None else tl.load(scale)
        encoded, stored = encode_nvfp4(blocks, global_scale, NUM_BLOCKS)
    elif BLOCK == 32:
        encoded, stored = encode_mxfp8(blocks)
    else:
        encoded, stored = encode_fp8_blocks(blocks)
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // BLOCK
    at = row * BLOCKS_PER_ROW + block
    byte = tl.arange(0, BLOCK_BYTES)[None, :]
    tl.store(data + at[:, None] * BLOCK_BYTES + byte, encoded, mask=is_real[:, None])
    tl.store(scales + scale_offset(row, block, BLOCKS_PER_ROW, FORMAT), stored, mask=is_real)


@triton.jit
def store_row(
    values, row, data, scales, scale, WIDTH: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr, first_column=0
):
    """Quantise `values` [COLUMNS] and store them as columns from `first_column` of row `row`; those from WIDTH are not.

    A block must not be cut: COLUMNS and first_column are multiples of its length.
    """
    if FORMAT == "fp8":
        # Another shape than the caller's: a store of bytes would widen the layout in which it adds up a row
        WIDE: tl.constexpr = min(COLUMNS, 16)
        encoded = tl.reshape(encode_fp8(values, scale), (COLUMNS // WIDE, WIDE))
        column = first_column + tl.arange(0, COLUMNS // WIDE)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
        tl.store(data + row * WIDTH + column, encoded, mask=column < WIDTH)
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


def num_zeroing_programs(rows: int, blocks: int, *, swizzled: bool) -> int:
    """How many calls of `zero_invented_rows` cover the invented rows of scales with `blocks` blocks a row."""
    return -(-blocks // 4 // (_ZEROED_WORDS.value // 128)) if swizzled and rows % 128 else 0
