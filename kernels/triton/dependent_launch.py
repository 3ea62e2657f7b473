"""Programmatic dependent launch: a kernel starts before the one in front of it has ended, and waits for its end.

A kernel with OVERLAP calls gdc_wait before it reads or writes what any other kernel writes or reads, and
gdc_launch_dependents as soon as it likes. Before gdc_wait it may read parameters only, and these only where
`may_read_early`: outside a captured graph the kernel in front may just have written them. So a graph must not write the
parameters that it uses.

A kernel that does both by `wait_for_inputs` lets nothing start before all that came before it is done. So the kernel
behind it may read before it waits, in a graph and outside, what was written in front of the two.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_CAPABILITY = (9, 0)


def overlaps(x: Tensor) -> bool:
    """Whether kernels on x are launched so: the constexpr OVERLAP, and the option launch_pdl of a launch."""
    return x.is_cuda and _can_overlap(x.get_device())


def overlapping(x: Tensor, *, alone: bool = True) -> dict[str, Any]:
    """These two arguments of a launch on the device of x. Not `alone` there: nothing may take the place of a peer."""
    overlap = alone and overlaps(x)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


def may_read_early(x: Tensor) -> bool:
    """Whether a kernel on x may read parameters before it has waited."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _can_overlap(device_idx: int) -> bool:
    return torch.cuda.get_device_capability(device_idx) >= _FIRST_CAPABILITY


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Everything that earlier kernels wrote is there afterwards, and the next kernel may start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
