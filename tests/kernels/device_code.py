"""Small Triton kernels that the tests of the interpreter and of compiling ahead of time run."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.triton import number_formats


@triton.jit
def cast(x, out, num_elements, BLOCK: tl.constexpr):
    gdc_wait()
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = idx < num_elements
    tl.store(out + idx, tl.load(x + idx, mask=inside).to(out.dtype.element_ty), mask=inside)
    gdc_launch_dependents()


@triton.jit
def arithmetic(x, y, out, BLOCK: tl.constexpr):
    """Row by row: sum, difference, product, quotient, larger one, fused x y + x, clamped x, minus x, |x|, choice."""
    idx = tl.arange(0, BLOCK)
    a, b = tl.load(x + idx), tl.load(y + idx)
    tl.store(out + idx, a + b)
    tl.store(out + BLOCK + idx, a - b)
    tl.store(out + 2 * BLOCK + idx, a * b)
    tl.store(out + 3 * BLOCK + idx, (a / b).to(out.dtype.element_ty))
    tl.store(out + 4 * BLOCK + idx, tl.maximum(a, b))
    tl.store(out + 5 * BLOCK + idx, tl.fma(a, b, a))
    tl.store(out + 6 * BLOCK + idx, tl.clamp(a, b, b + 1))
    tl.store(out + 7 * BLOCK + idx, -a)
    tl.store(out + 8 * BLOCK + idx, tl.abs(a))
    tl.store(out + 9 * BLOCK + idx, tl.where(a > b, a, b * 2))


@triton.jit
def reduce(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums, maxima and minima of the rows."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    values = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(out + row, tl.sum(values, 1))
    tl.store(out + ROWS + row, tl.max(values, 1))
    tl.store(out + 2 * ROWS + row, tl.min(values, 1))


@triton.jit
def dot(a, b, out, SIZE: tl.constexpr):
    idx = tl.arange(0, SIZE)
    at = idx[:, None] * SIZE + idx[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def reciprocal(x, out, BLOCK: tl.constexpr):
    idx = tl.arange(0, BLOCK)
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [tl.load(x + idx)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + idx, inverse)


@triton.jit
def unknown_instruction(x, out, BLOCK: tl.constexpr):
    idx = tl.arange(0, BLOCK)
    cosine = tl.inline_asm_elementwise(
        "cos.approx.f32 $0, $1;", "=f,f", [tl.load(x + idx)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + idx, cosine)


@triton.jit
def merge_heads(
    parts,
    out,
    data,
    scales,
    scale,
    num_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_ZEROING: tl.constexpr,
):
    """Two parts of each head's output become one, stored and quantised: a program owns a head of a row."""
    row, head = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    if row < num_rows:
        at = row * WIDTH + head * HEAD_DIM + tl.arange(0, HEAD_DIM)
        merged = tl.load(parts + at) + tl.load(parts + num_rows * WIDTH + at)
        values = merged.to(out.dtype.element_ty)
        tl.store(out + at, values)
        wide_row = row.to(tl.int64)
        number_formats.store_row(
            values, wide_row, data, scales, scale, WIDTH, FORMAT, HEAD_DIM, first_column=head * HEAD_DIM
        )
    elif head == 0 and row - num_rows < NUM_ZEROING:
        number_formats.zero_invented_rows(scales, num_rows, row - num_rows, WIDTH, FORMAT)
