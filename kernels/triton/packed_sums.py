"""Sums over parts of K, in order of the parts, with what follows a sum."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.triton.dependent_launch import overlapping

_ADDED = 1024  # elements of a program


@triton.jit
def add_splits(
    parts,
    global_scale,
    bias,
    out,
    num_elements,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The parts of `multiply_packed` in order of the splits."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < num_elements
    total = tl.zeros((ELEMENTS,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts + split * num_elements.to(tl.int64) + at, mask=inside, other=0.0)
    if global_scale is not None:
        total = tl.div_rn(total, tl.load(global_scale))
    if bias is not None:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_splits_into(parts: Tensor, global_scale: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """The sum over the first dimension of `parts` [splits, T, N], divided by the scale, plus the bias."""
    add_splits[(triton.cdiv(out.numel(), _ADDED),)](
        parts,
        global_scale,
        bias,
        out,
        out.numel(),
        out.shape[1],
        NUM_SPLITS=parts.shape[0],
        ELEMENTS=_ADDED,
        **overlapping(out),
    )
