"""Device functions: tiles of packed weights, dequantised and multiplied in registers.

Each tensor has one element a thread, or a vector, so that Triton gives thread t of a program its element t: then
m16n8k16 finds in each register what kernels/packed_weight.py has put there. Nothing goes from thread to thread.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from dist_infer.kernels.triton.weight_tiles import PAIRS_OF_E2M1, PAIRS_OF_E4M3

# Of eight E4M3 scales in two words the four that $6 selects, each twice and times 2^117.
_NVFP4_SCALES = tl.constexpr(
    """{ .reg .b32 a, m, n;
    mov.b32 m, 0x7E807E80;
    mov.b32 n, 0x77007700;
    prmt.b32 $3, $4, $5, $6;
    prmt.b32 a, $3, 0, 0x1404;
    shr.u32 a, a, 4;
    mul.bf16x2 a, a, m;
    mul.bf16x2 a, a, n;
    prmt.b32 $0, a, a, 0x1010;
    prmt.b32 $1, a, a, 0x3232;
    prmt.b32 a, $3, 0, 0x3424;
    shr.u32 a, a, 4;
    mul.bf16x2 a, a, m;
    mul.bf16x2 a, a, n;
    prmt.b32 $2, a, a, 0x1010;
    prmt.b32 $3, a, a, 0x3232; }"""
)
# Four UE8M0 scales, each twice; the byte 0 is 2^-127.
_MXFP8_SCALES = tl.constexpr(
    """{ .reg .b32 m, s;
    mov.b32 m, 0x00400040;
    mov.b32 s, $4;
    prmt.b32 $0, s, 0, 0x0404;
    shr.u32 $0, $0, 1;
    max.u16x2 $0, $0, m;
    prmt.b32 $1, s, 0, 0x1414;
    shr.u32 $1, $1, 1;
    max.u16x2 $1, $1, m;
    prmt.b32 $2, s, 0, 0x2424;
    shr.u32 $2, $2, 1;
    max.u16x2 $2, $2, m;
    prmt.b32 $3, s, 0, 0x3434;
    shr.u32 $3, $3, 1;
    max.u16x2 $3, $3, m; }"""
)
_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


@triton.jit
def four(x, THREADS: tl.constexpr):
    """The columns of [THREADS, 4]."""
    even, odd = tl.split(tl.reshape(x, (THREADS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def pairs_of_e2m1(word, scale):
    return tl.inline_asm_elementwise(
        PAIRS_OF_E2M1, "=r,=r,=r,=r,r,r", [word, scale], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
    )


@triton.jit
def pairs_of_e4m3(word, scale):
    return tl.inline_asm_elementwise(PAIRS_OF_E4M3, "=&r,=&r,r,r", [word, scale], (tl.int32, tl.int32), True, 1)


@triton.jit
def nvfp4_scales(low, high, selector):
    return tl.inline_asm_elementwise(
        _NVFP4_SCALES,
        "=&r,=&r,=&r,=&r,r,r,r",
        [low, high, selector],
        (tl.int32, tl.int32, tl.int32, tl.int32),
        True,
        1,
    )


@triton.jit
def mxfp8_scales(word):
    return tl.inline_asm_elementwise(
        _MXFP8_SCALES, "=&r,=&r,=&r,=&r,r", [word], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
    )


@triton.jit
def part_pairs(words, scales, PART: tl.constexpr, FORMAT: tl.constexpr):
    """The four pairs that a thread holds of one row in 32 columns of a tile."""
    if FORMAT == "nvfp4":
        pairs = pairs_of_e2m1(words[PART], scales[PART])
    else:
        pairs = pairs_of_e4m3(words[2 * PART], scales[PART]) + pairs_of_e4m3(words[2 * PART + 1], scales[PART])
    return pairs


@triton.jit
def multiply_add(upper_0, upper_1, lower_0, lower_1, input_0, input_1, sums):
    """sums + 16 x 16 weights by 16 x 8 inputs: of the upper and the lower rows columns 2 c and 2 c + 8."""
    return tl.inline_asm_elementwise(
        _MMA,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [upper_0, lower_0, upper_1, lower_1, input_0, input_1, sums[0], sums[1], sums[2], sums[3]],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        True,
        1,
    )


@triton.jit
def words_and_scales(loaded, selector, FORMAT: tl.constexpr, THREADS: tl.constexpr):
    """Of a group of 16 rows: upper words, lower words, upper scales, lower scales."""
    if FORMAT == "nvfp4":
        scales = four(loaded[2], THREADS)
        upper_scales = nvfp4_scales(scales[0], scales[1], selector)
        lower_scales = nvfp4_scales(scales[2], scales[3], selector)
    else:
        scales = mxfp8_scales(loaded[2])
        upper_scales, lower_scales = (scales[0], scales[1]), (scales[2], scales[3])
    return four(loaded[0], THREADS), four(loaded[1], THREADS), upper_scales, lower_scales


@triton.jit
def add_tile(
    loaded,
    x_at,
    is_token,
    selector,
    sums,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """sums, of 16 rows by eight tokens, with the products of a tile: upper rows, lower rows, scales as they lie."""
    held = words_and_scales(loaded, selector, FORMAT, THREADS)
    for part in tl.static_range(COLUMNS // 32):
        x = four(tl.load(x_at + part * 16, mask=is_token, other=0), THREADS)
        upper = part_pairs(held[0], held[2], part, FORMAT)
        lower = part_pairs(held[1], held[3], part, FORMAT)
        sums = multiply_add(upper[0], upper[1], lower[0], lower[1], x[0], x[1], sums)
        sums = multiply_add(upper[2], upper[3], lower[2], lower[3], x[2], x[3], sums)
    return sums
