"""Device functions on words of two narrow floats: one instruction for both, where the compiler takes them one by one.

DTYPE is bfloat16 or float16; a word is an int32, its low half the element in front.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.triton.number_formats import larger_size

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PAIR_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
_PAIR_F16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
_TWO_OF_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
_TWO_OF_F16 = tl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
)


@triton.jit
def widened(values):
    """Floats of any size in float32."""
    if not _INTERPRETED and values.dtype == tl.bfloat16 and values.numel > 1:
        wide = tl.inline_asm_elementwise(_TWO_OF_BF16, "=r,=r,r", [values], dtype=tl.float32, is_pure=True, pack=2)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def paired(even, odd, DTYPE: tl.constexpr):
    """Words of float32 rounded to DTYPE."""
    PAIR: tl.constexpr = _PAIR_BF16 if tl.bfloat16 == DTYPE else _PAIR_F16
    return tl.inline_asm_elementwise(PAIR, "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpaired(words, DTYPE: tl.constexpr):
    """The two of each word in float32."""
    TWO_OF: tl.constexpr = _TWO_OF_BF16 if tl.bfloat16 == DTYPE else _TWO_OF_F16
    return tl.inline_asm_elementwise(TWO_OF, "=r,=r,r", [words], dtype=(tl.float32, tl.float32), is_pure=True, pack=1)


@triton.jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _larger_f16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def paired_amax(words, DTYPE: tl.constexpr):
    """The largest size in each row of words [N, M]; NaN if one is NaN."""
    largest = tl.reduce(words, 1, _larger_bf16) if tl.bfloat16 == DTYPE else tl.reduce(words, 1, _larger_f16)
    even, odd = unpaired(largest, DTYPE)
    return larger_size(even, odd)
