"""What latent attention of one query a sequence does before and after it attends: products of each head with its kv_b.

For few sequences these are matrices of few rows, of which this kernel is faster than torch.bmm: 16 heads of one
sequence decode in 19.6 us instead of 22.2 on an H200. It asks for its weights before it waits for the kernel before it,
and copies the rotated channels along. For many sequences, or many heads of some, it reads the weights too often.

S sequences, N heads, L latent, R rotated, P plain and V value channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, QuantizedTensor
from dist_infer.kernels.triton import number_formats
from dist_infer.kernels.triton.dependent_launch import may_read_early, overlaps
from dist_infer.kernels.triton.number_formats import num_zeroing_programs
from dist_infer.kernels.triton.quantize import kernel_format, quantize

_ROWS = 16
_MAX_ROWS = 64  # of a head, and
_MAX_ALL_ROWS = 1024  # of all heads: beyond, torch.bmm is faster


def fold_queries(q: Tensor, kv_b: Tensor, value_dim: int, *, one_way: bool = False) -> Tensor:
    """Queries on cached rows: each head's plain channels times the key half of its kv_b, then its rotated channels.

    `one_way`: by this kernel for any number of sequences, of which the bits of a row then don't depend.

    Shapes: q [S, N, P + R], kv_b [N, P + V, L] -> [S, N, L + R].
    """
    plain_dim, latent_dim = kv_b.shape[1] - value_dim, kv_b.shape[2]
    out = torch.empty(*q.shape[:2], latent_dim + q.shape[2] - plain_dim, dtype=q.dtype, device=q.device)
    queries, weight = q[..., :plain_dim].transpose(0, 1), kv_b[:, :plain_dim]
    folded = out[..., :latent_dim].transpose(0, 1)
    if one_way or _has_few_rows(queries):
        _multiply(queries, weight, folded, columns=64, num_copied=q.shape[2] - plain_dim)
    else:
        torch.bmm(queries, weight, out=folded)
        out[..., latent_dim:] = q[..., plain_dim:]
    return out


def apply_values(
    latents: Tensor, kv_b: Tensor, out: Tensor, *, one_way: bool = False, quantized: QuantizedTensor | None = None
) -> None:
    """Fills `out`: each head's attended latents times the value half of its kv_b. `one_way`: as of `fold_queries`.

    With `quantized` it fills that instead, with what `quantize` makes of the rounded rows; `out` is anything then.

    Shapes: latents [S, N, L], kv_b [N, P + V, L], out [S, N, V] contiguous, quantized (S, N * V).
    """
    weight = kv_b[:, kv_b.shape[1] - out.shape[2] :].transpose(1, 2)
    rows = latents.transpose(0, 1)
    few = one_way or _has_few_rows(rows)
    if few and quantized is not None and _is_by_elements_or_32(quantized, out.shape[2]):
        _multiply(rows, weight, out.transpose(0, 1), columns=32, quantized=quantized)
        return
    if few:
        _multiply(rows, weight, out.transpose(0, 1), columns=16)
    else:
        torch.bmm(rows, weight, out=out.transpose(0, 1))
    if quantized is not None:
        quantize(out.view(len(out), -1), quantized)


def _is_by_elements_or_32(quantized: QuantizedTensor, value_dim: int) -> bool:
    if isinstance(quantized, Mxfp8Tensor):
        return value_dim % quantized.BLOCK == 0
    return isinstance(quantized, Fp8Tensor) and quantized.scaling is Fp8Scaling.TENSOR


def _has_few_rows(x: Tensor) -> bool:
    is_narrow = x.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and x.stride(2) == 1 and x.shape[1] <= _MAX_ROWS and len(x) * x.shape[1] <= _MAX_ALL_ROWS


def _multiply(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    columns: int,
    num_copied: int = 0,
    quantized: QuantizedTensor | None = None,
) -> None:
    """out = x @ weight for each head, `columns` of the result a program.

    As many channels as `num_copied` behind those of x are copied behind those of out. With `quantized`, the rows of all
    heads side by side, that is filled instead: FP8 of one scale, or MXFP8, whose blocks are 32 columns.

    Shapes: x [N, S, K], weight [N, K, M] with either of K and M contiguous, out [N, S, M], quantized (S, N * M).
    """
    num_heads, num_rows, inner = x.shape
    num_columns = out.shape[2]
    name, num_zeroing = "", 0
    if quantized is not None:
        name, block, swizzled = kernel_format(quantized)
        num_zeroing = num_zeroing_programs(num_rows, num_heads * num_columns // block, swizzled=swizzled)
    extra = (num_copied > 0) + (num_zeroing > 0)
    grid = (triton.cdiv(num_columns, columns) + extra, num_heads, triton.cdiv(num_rows, _ROWS))
    _multiply_kernel[grid](
        x,
        weight,
        out,
        None if quantized is None else quantized.data,
        None if quantized is None else quantized.scales,
        num_rows,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(2) if weight.stride(1) == 1 else weight.stride(1),
        out.stride(0),
        out.stride(1),
        INNER=inner,
        COLUMNS=num_columns,
        NUM_COPIED=num_copied,
        INNER_IS_CONTIGUOUS=weight.stride(1) == 1,
        ROWS=_ROWS,
        INNER_BLOCK=max(16, triton.next_power_of_2(inner)),
        COLUMN_BLOCK=columns,
        COPY_BLOCK=triton.next_power_of_2(num_copied) if num_copied else 1,
        FORMAT=name,
        WIDTH=num_heads * num_columns,
        NUM_ZEROING=num_zeroing,
        EARLY=may_read_early(x),
        OVERLAP=overlaps(x),
        num_warps=4,
        launch_pdl=overlaps(x),
    )


@triton.jit(do_not_specialize=["num_rows", "x_head_stride", "out_head_stride"])
def _multiply_kernel(
    x,
    weight,
    out,
    data,
    scales,
    num_rows,
    x_head_stride,
    x_row_stride,
    weight_head_stride,
    weight_stride,
    out_head_stride,
    out_row_stride,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_COPIED: tl.constexpr,
    INNER_IS_CONTIGUOUS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    COPY_BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_ZEROING: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    inner, column = tl.arange(0, INNER_BLOCK), tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    if OVERLAP and not EARLY:
        gdc_wait()
    own = weight + head * weight_head_stride
    if INNER_IS_CONTIGUOUS:
        at = own + column[:, None] * weight_stride + inner[None, :]
        factors = tl.trans(tl.load(at, mask=(column < COLUMNS)[:, None] & (inner < INNER)[None, :], other=0.0))
    else:
        at = own + inner[:, None] * weight_stride + column[None, :]
        factors = tl.load(at, mask=(inner < INNER)[:, None] & (column < COLUMNS)[None, :], other=0.0)
    if OVERLAP:
        if EARLY:
            gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = (row < num_rows)[:, None]
    x_at = x + head * x_head_stride + row[:, None].to(tl.int64) * x_row_stride
    out_at = out + head * out_head_stride + row[:, None].to(tl.int64) * out_row_stride
    if NUM_COPIED > 0 and tl.program_id(0) == tl.num_programs(0) - 1:
        channel = tl.arange(0, COPY_BLOCK)[None, :]
        copied = is_row & (channel < NUM_COPIED)
        tl.store(out_at + COLUMNS + channel, tl.load(x_at + INNER + channel, mask=copied), mask=copied)
    elif NUM_ZEROING > 0 and tl.program_id(0) == tl.num_programs(0) - 1:
        if tl.program_id(1) + tl.program_id(2) == 0:
            for program in range(NUM_ZEROING):
                number_formats.zero_invented_rows(scales, num_rows, program, WIDTH, FORMAT)
    else:
        rows = tl.load(x_at + inner[None, :], mask=is_row & (inner < INNER)[None, :], other=0.0)
        product = tl.dot(rows, factors, input_precision="ieee").to(out.dtype.element_ty)
        if FORMAT == "":
            tl.store(out_at + column[None, :], product, mask=is_row & (column < COLUMNS)[None, :])
        elif FORMAT == "fp8":
            at = data + row[:, None].to(tl.int64) * WIDTH + head * COLUMNS + column[None, :]
            tl.store(at, number_formats.encode_fp8(product, scales), mask=is_row & (column < COLUMNS)[None, :])
        else:
            block = head * (COLUMNS // COLUMN_BLOCK) + tl.program_id(0)
            number_formats.store_blocks(
                product, row.to(tl.int64), block, row < num_rows, data, scales, None, WIDTH, FORMAT, ROWS
            )
