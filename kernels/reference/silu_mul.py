"""The gated activation in plain torch; the contract stands in kernels/silu_mul.py."""

import torch
from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `dist_infer.kernels.silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=1)
    if gate_up.dtype in (torch.float32, torch.float64):
        return functional.silu(gate).mul_(up)
    return functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
