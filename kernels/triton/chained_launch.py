"""Launches of a chain of kernels, each of which may begin before the one before it has ended.

Every kernel of the chain waits for all that came before it, then lets the next one begin, and only then reads and
writes. So the next one may read, before it waits itself, what the kernel two places before it wrote, and parameters.
That holds in a capture and outside of one, so that both run the same compiled kernel.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def chained(x: Tensor) -> dict[str, Any]:
    """Arguments of a launch on the device of `x`: the constexpr CHAINED, and what the launcher needs to know."""
    return {"CHAINED": True, "launch_pdl": True} if x.is_cuda and _is_hopper(x.device) else {"CHAINED": False}


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait_for_inputs(CHAINED: tl.constexpr):
    """Everything that earlier kernels wrote is there afterwards."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
