"""A device function that stores a row quantised, from the registers that the sum of a row has left it in.

Bytes and places are those of number_formats.store_row, but no value goes to another thread on its way: what decides
for few rows is how long one of them takes.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.triton.number_formats import (
    block_len,
    encode_fp8_blocks,
    encode_mxfp8,
    encode_nvfp4,
    scale_offset,
    to_e4m3,
)

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

_ROUND_BF16 = tl.constexpr("""
{
.reg .b32 t, low, high;
cvt.rn.bf16x2.f32 t, $3, $2;
shl.b32 low, t, 16;
and.b32 high, t, 0xFFFF0000;
mov.b32 $0, low;
mov.b32 $1, high;
}""")
_ROUND_F16 = tl.constexpr("""
{
.reg .b32 t;
.reg .b16 low, high;
cvt.rn.f16x2.f32 t, $3, $2;
mov.b32 {low, high}, t;
cvt.f32.f16 $0, low;
cvt.f32.f16 $1, high;
}""")


@triton.jit
def rounded(values, DTYPE: tl.constexpr):
    """float32 values as DTYPE holds them, still in float32.

    Two by two: the compiler's own conversion of values one by one, a sixteenth as fast, would take longer than the rest
    of a row's quantisation.
    """
    if tl.float32 == DTYPE:
        result = values
    elif _INTERPRETED:
        result = values.to(DTYPE).to(tl.float32)
    else:
        TWO: tl.constexpr = _ROUND_BF16 if tl.bfloat16 == DTYPE else _ROUND_F16
        result = tl.inline_asm_elementwise(TWO, "=f,=f,f,f", [values], dtype=tl.float32, is_pure=True, pack=2)
    return result


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
    values, row, data, scales, scale, WIDTH: tl.constexpr, FORMAT: tl.constexpr, COLUMNS: tl.constexpr
):
    """Quantise `values` [COLUMNS], zero from WIDTH, and store them as row `row`, an int64.

    Values are in float32, as `rounded` gives them; `scale` is of load_scale.
    """
    BLOCK: tl.constexpr = 16 if FORMAT == "fp8" or FORMAT == "fp8_rows" else block_len(FORMAT)
    BLOCK_BYTES: tl.constexpr = 8 if FORMAT == "nvfp4" or FORMAT == "nvfp4_linear" else BLOCK
    NUM_BLOCKS: tl.constexpr = COLUMNS // BLOCK
    BLOCKS_PER_ROW: tl.constexpr = WIDTH // BLOCK
    block = tl.arange(0, NUM_BLOCKS)
    is_real = block < BLOCKS_PER_ROW
    if FORMAT == "fp8":
        encoded = tl.reshape(to_e4m3(values.to(tl.float32) * tl.div_rn(1.0, scale)), (NUM_BLOCKS, BLOCK))
    elif FORMAT == "fp8_rows":
        encoded, stored = encode_fp8_blocks(tl.reshape(values, (1, COLUMNS)))
        first = tl.arange(0, 1).to(tl.int64)
        _store_scales(scales, row + first, stored, first == 0)
        encoded = tl.reshape(encoded, (NUM_BLOCKS, BLOCK))
    else:
        blocks = tl.reshape(values, (NUM_BLOCKS, BLOCK))
        if BLOCK == 16:
            encoded, stored = encode_nvfp4(blocks, scale, NUM_BLOCKS)
        elif BLOCK == 32:
            encoded, stored = encode_mxfp8(blocks)
        else:
            encoded, stored = encode_fp8_blocks(blocks)
        _store_scales(scales, scale_offset(row, block, BLOCKS_PER_ROW, FORMAT), stored, is_real)
    in_row = block[:, None] * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    data_row = tl.multiple_of(data + row * (BLOCKS_PER_ROW * BLOCK_BYTES), data_alignment(FORMAT))
    tl.store(data_row + in_row, encoded, mask=is_real[:, None])
