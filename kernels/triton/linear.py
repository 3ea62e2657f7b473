"""Matrix products of few rows in Triton; the contract stands in kernels/linear.py.

With few rows the time is that of reading the weights once. A program takes a strip of outputs and runs along all
inputs, so that nothing is added across programs. For one row each thread multiplies what it loads; for up to sixteen
the matrix units do, on a tile of sixteen, so that what else is in the batch doesn't change a row. These fill shared
memory, and a next kernel that comes early only gets in their way. More rows, small matrices, several rows of few
outputs and what doesn't lie on 16 bytes are cuBLAS's.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.triton.dependent_launch import may_read_early, overlaps
from dist_infer.kernels.triton.silu_mul import gated, silu_mul

_MAX_ROWS = 16
_MIN_WEIGHTS = 2**18
_STRIP, _STRIP_INPUTS = 2, 1024  # outputs of a program for one row, and inputs that it takes at a time
_TILE_OUTPUTS = 64  # of a program for several rows
_MIN_TILE_OUTPUTS = 2048  # below that too few programs would read
_MANY_OUTPUTS = 16384
_LARGE_SHARED_BYTES = 170_000


@triton.jit
def _output_rows(first, num_outputs, GATED: tl.constexpr, STRIP: tl.constexpr):
    """The rows of the weights that a program takes: a strip, or half of one among the gates and half among the ups."""
    idx = tl.arange(0, STRIP)
    if GATED:
        channel = tl.minimum(first + idx % (STRIP // 2), num_outputs - 1)
        return (channel + (idx // (STRIP // 2)) * num_outputs).to(tl.int64)
    return tl.minimum(first + idx, num_outputs - 1).to(tl.int64)


@triton.jit
def _eights(weight, rows, weight_stride, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Weights [rows, BLOCK_K / 8, 8] from input k on: an eight is 16 bytes."""
    column = k + 8 * tl.arange(0, BLOCK_K // 8)[:, None] + tl.arange(0, 8)[None, :]
    at = weight + rows[:, None, None] * weight_stride + column[None, :, :]
    if K % BLOCK_K == 0:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(column < K)[None, :, :], other=0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["is_early"])
def _row_product(
    x,
    weight,
    bias,
    added,
    out,
    num_outputs,
    weight_stride,
    is_early,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION is not None
    NUM_OUTPUTS: tl.constexpr = STRIP // 2 if GATED else STRIP
    first = tl.program_id(0) * NUM_OUTPUTS
    rows = _output_rows(first, num_outputs, GATED, STRIP)
    if OVERLAP:
        gdc_launch_dependents()
        if is_early == 0:
            gdc_wait()
    block = _eights(weight, rows, weight_stride, 0, K, BLOCK_K)
    if OVERLAP:
        gdc_wait()
    column = 8 * tl.arange(0, BLOCK_K // 8)[:, None] + tl.arange(0, 8)[None, :]
    sums = tl.zeros([STRIP, BLOCK_K // 8], tl.float32)
    for k in range(0, K, BLOCK_K):
        following = block
        if k + BLOCK_K < K:
            following = _eights(weight, rows, weight_stride, k + BLOCK_K, K, BLOCK_K)
        values = tl.load(x + k + column, mask=k + column < K, other=0) if K % BLOCK_K else tl.load(x + k + column)
        sums += tl.sum(block.to(tl.float32) * values.to(tl.float32)[None, :, :], 2)
        block = following
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + rows).to(tl.float32)
    if GATED:
        rounded = total.to(out.dtype.element_ty).to(tl.float32)  # as if the activation were a kernel of its own
        gate, up = tl.split(tl.trans(tl.reshape(rounded, [2, NUM_OUTPUTS])))
        total = gated(gate, up, ACTIVATION)
    output = first + tl.arange(0, NUM_OUTPUTS)
    if added is not None:
        rounded = total.to(out.dtype.element_ty).to(tl.float32)  # as if the addition were a kernel of its own
        total = rounded + tl.load(added + output, mask=output < num_outputs, other=0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), mask=output < num_outputs)


@triton.jit(do_not_specialize=["num_rows"])
def _tile_product(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    x_stride,
    weight_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    output = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_K)
    weight_at = weight + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * weight_stride + column[None, :]
    x_at = x + row[None, :] * x_stride + column[:, None]
    sums = tl.zeros([STRIP, ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            block = tl.load(weight_at + k, eviction_policy="evict_first")
            values = tl.load(x_at + k, mask=(row < num_rows)[None, :], other=0)
        else:
            inside = k + column < K
            block = tl.load(weight_at + k, mask=inside[None, :], other=0, eviction_policy="evict_first")
            values = tl.load(x_at + k, mask=(row < num_rows)[None, :] & inside[:, None], other=0)
        sums = tl.dot(block, values, sums)
    held = output < num_outputs
    if bias is not None:
        sums += tl.load(bias + output, mask=held, other=0).to(tl.float32)[:, None]
    at = out + row[None, :] * num_outputs + output[:, None]
    tl.store(at, sums.to(out.dtype.element_ty), mask=held[:, None] & (row < num_rows)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `dist_infer.kernels.linear.linear`."""
    if not _takes(x, weight):
        return functional.linear(x, weight, bias)
    return few_rows(x, weight, bias)


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: GatedActivation = GatedActivation.SILU
) -> Tensor:
    """See `dist_infer.kernels.gated_linear.gated_linear`."""
    if len(x) == 1 and _takes(x, weight):
        return one_row(x, weight, bias, gated_by=activation)
    return silu_mul(linear(x, weight, bias), activation)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` of one to sixteen rows on 16-byte boundaries."""
    if len(x) == 1:
        return one_row(x, weight, bias, gated_by=None)
    num_outputs, num_inputs = weight.shape
    out = torch.empty((len(x), num_outputs), dtype=x.dtype, device=x.device)
    block_k, num_stages = (128, 5) if num_outputs > _MANY_OUTPUTS else (256, 4)
    if x.is_cuda and _shared_bytes(x.get_device()) < _LARGE_SHARED_BYTES:
        block_k, num_stages = 128, 4
    _tile_product[(triton.cdiv(num_outputs, _TILE_OUTPUTS),)](
        x,
        weight,
        bias,
        out,
        len(x),
        num_outputs,
        x.stride(0),
        weight.stride(0),
        K=num_inputs,
        ROWS=_MAX_ROWS,
        STRIP=_TILE_OUTPUTS,
        BLOCK_K=block_k,
        STAGES=num_stages,
        num_warps=4,
    )
    return out


def added_linear(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor) -> Tensor:
    """See `dist_infer.kernels.added_linear.added_linear`."""
    if len(x) == 1 and _takes(x, weight):
        return one_row(x, weight, bias, gated_by=None, added=added)
    return linear(x, weight, bias).add_(added)


def one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gated_by: GatedActivation | None,
    added: Tensor | None = None,
) -> Tensor:
    """`linear`, `gated_linear` or `added_linear` of one row on 16-byte boundaries."""
    num_outputs, num_inputs = weight.shape
    num_outputs = num_outputs if gated_by is None else num_outputs // 2
    out = torch.empty((1, num_outputs), dtype=x.dtype, device=x.device)
    overlap = overlaps(x)
    _row_product[(triton.cdiv(num_outputs, _STRIP if gated_by is None else _STRIP // 2),)](
        x,
        weight,
        bias,
        added,
        out,
        num_outputs,
        weight.stride(0),
        int(may_read_early(x)),
        K=num_inputs,
        ACTIVATION=None if gated_by is None else gated_by.value,
        STRIP=_STRIP,
        BLOCK_K=_STRIP_INPUTS,
        OVERLAP=overlap,
        num_warps=2,
        launch_pdl=overlap,
    )
    return out


def _takes(x: Tensor, weight: Tensor) -> bool:
    aligned = all(
        y.stride(1) == 1 and y.stride(0) % 16 == 0 and y.data_ptr() % 16 == 0 and y.shape[1] % 16 == 0
        for y in (x, weight)
    )
    is_wide = len(x) == 1 or len(weight) >= _MIN_TILE_OUTPUTS
    fits = 0 < len(x) <= _MAX_ROWS and weight.numel() >= _MIN_WEIGHTS and x.dtype.itemsize == 2
    return aligned and is_wide and fits


@cache
def _shared_bytes(device_idx: int) -> int:
    shared_bytes: int = driver.active.utils.get_device_properties(device_idx)["max_shared_mem"]
    return shared_bytes
