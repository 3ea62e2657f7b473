"""A device function that stores a row quantised, from the registers that the sum of a row has left it in.

Bytes and places are those of number_formats.store_row, but no value goes to another thread on its way: what decides
for few rows is how long one of them takes.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.triton.float_pairs import paired, paired_amax, unpaired
from dist_infer.kernels.triton.number_formats import (
    block_amax,
    block_len,
    encode_scaled_fp8,
    encode_wide,
    scale_offset,
    to_e4m3,
)
from dist_infer.kernels.triton.rms_norm import place_in_row

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_STORE_BYTE = tl.constexpr("""
{
.reg .pred q;
.reg .b16 h;
setp.ne.s32 q, $3, 0;
cvt.u16.u32 h, $2;
@q st.global.b8 [$1], h;
mov.b32 $0, 0;
}""")
_STORE_WORD = tl.constexpr("""
{
.reg .pred q;
setp.ne.s32 q, $3, 0;
@q st.global.b32 [$1], $2;
mov.b32 $0, 0;
}""")


@triton.jit
def rounded_blocks(values, DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Float32 values as DTYPE holds them, still in float32, [NUM_BLOCKS, BLOCK], and the amax of each block."""
    if tl.float32 == DTYPE or _INTERPRETED:
        blocks = tl.reshape(values.to(DTYPE).to(tl.float32), (NUM_BLOCKS, BLOCK))
        amax = block_amax(blocks)
    else:
        even, odd = tl.split(tl.reshape(values, (NUM_BLOCKS, BLOCK // 2, 2)))
        words = paired(even, odd, DTYPE)
        amax = paired_amax(words, DTYPE)
        even, odd = unpaired(words, DTYPE)
        blocks = tl.reshape(tl.join(even, odd), (NUM_BLOCKS, BLOCK))
    return blocks, amax


@triton.constexpr_function
def data_alignment(quant_format):
    """Bytes of a row's data that a thread stores at once: eight elements."""
    return 4 if quant_format in ("nvfp4", "nvfp4_linear") else 8


@triton.jit
def load_scale(scale):
    """The scale of FP8 or the global one of NVFP4, before it is needed."""
    value = 1.0
    if scale is not None:
        value = tl.load(scale)
    return value


@triton.jit
def _store_scales(scales, offset, values, is_real):
    """Scales, by whichever threads have them: several may have the same."""
    if _INTERPRETED:
        tl.store(scales + offset, values, mask=is_real)
    elif scales.dtype.element_ty.primitive_bitwidth == 8:
        tl.inline_asm_elementwise(
            _STORE_BYTE,
            "=r,l,r,r",
            [scales.to(tl.int64) + offset, values.to(tl.int32), is_real.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            _STORE_WORD,
            "=r,l,r,r",
            [scales.to(tl.int64) + 4 * offset, values.to(tl.int32, bitcast=True), is_real.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_row_in_place(
    values,
    row,
    data,
    scales,
    scale,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    part=0,
    CHUNK: tl.constexpr = 0,
    PARTS: tl.constexpr = 1,
):
    """Round float32 `values` [COLUMNS], zero from WIDTH, to DTYPE, and store them quantised as row `row`, an int64.

    Or as a part of the row, but for "fp8_rows". `scale` is of load_scale.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "fp8" or FORMAT == "fp8_rows" else block_len(FORMAT)
    BLOCK_BYTES: tl.constexpr = 8 if FORMAT == "nvfp4" or FORMAT == "nvfp4_linear" else BLOCK
    NUM_BLOCKS: tl.constexpr = COLUMNS // BLOCK
    block = place_in_row(tl.arange(0, NUM_BLOCKS), part, CHUNK // BLOCK, PARTS)
    if FORMAT == "fp8_rows":
        blocks, amax = rounded_blocks(values, DTYPE, 1, COLUMNS)
        encoded, stored = encode_scaled_fp8(blocks, amax)
        encoded = tl.reshape(encoded, (NUM_BLOCKS, BLOCK))
        first = tl.arange(0, 1).to(tl.int64)
        _store_scales(scales, row + first, stored, first == 0)
    else:
        blocks, amax = rounded_blocks(values, DTYPE, NUM_BLOCKS, BLOCK)
        if FORMAT == "fp8":
            encoded = to_e4m3(blocks * tl.div_rn(1.0, scale))
        else:
            encoded, stored = encode_wide(blocks, amax, scale, FORMAT, NUM_BLOCKS)
            _store_scales(scales, scale_offset(row, block, WIDTH // BLOCK, FORMAT), stored, block < WIDTH // BLOCK)
    ROW_BYTES: tl.constexpr = WIDTH * BLOCK_BYTES // BLOCK
    at = block[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    data_row = tl.multiple_of(data + row * ROW_BYTES, data_alignment(FORMAT))
    tl.store(data_row + at, encoded, mask=at < ROW_BYTES)
