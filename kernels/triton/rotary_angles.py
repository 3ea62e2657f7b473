"""Angles of the rotary embedding in one Triton kernel; the contract stands in kernels/rotary_angles.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

_BLOCK = 128


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.rotary_angles.rotary_angles`."""
    cos, sin = (torch.empty(len(positions), len(frequencies), dtype=dtype, device=positions.device) for _ in range(2))
    if cos.numel():
        _angles_kernel[(triton.cdiv(cos.numel(), _BLOCK),)](
            positions,
            frequencies,
            factor,
            cos,
            sin,
            cos.numel(),
            NUM_PAIRS=len(frequencies),
            BLOCK=_BLOCK,
            num_warps=4,
            **overlapping(cos),
        )
    return cos, sin


@triton.jit(do_not_specialize=["num_angles"], do_not_specialize_on_alignment=["positions"])
def _angles_kernel(
    positions,
    frequencies,
    factor,
    cos,
    sin,
    num_angles,
    NUM_PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = idx < num_angles
    position = tl.load(positions + idx // NUM_PAIRS, mask=inside, other=0).to(tl.float64)
    angle = position * tl.load(frequencies + idx % NUM_PAIRS, mask=inside, other=0.0)
    by = tl.load(factor)
    tl.store(cos + idx, (tl.cos(angle) * by).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + idx, (tl.sin(angle) * by).to(sin.dtype.element_ty), mask=inside)
