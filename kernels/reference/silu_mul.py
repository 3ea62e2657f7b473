"""The gated activation in plain torch; the contract stands in kernels/silu_mul.py."""

import torch
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.carriers import GatedActivation

_ALPHA, _LIMIT = 1.702, 7.0  # of swigluoai


def silu_mul(gate_up: Tensor, activation: GatedActivation = GatedActivation.SILU) -> Tensor:
    """See `dist_infer.kernels.silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=1)
    if activation is GatedActivation.SWIGLUOAI:
        wide = gate.dtype if gate.dtype in (torch.float32, torch.float64) else torch.float32
        gate = gate.to(wide).clamp(max=_LIMIT)
        out = (gate * _ALPHA).sigmoid_().mul_(gate).mul_(up.to(wide).clamp(-_LIMIT, _LIMIT).add_(1))
        return out.to(gate_up.dtype)
    if gate_up.dtype in (torch.float32, torch.float64):
        return functional.silu(gate).mul_(up)
    return functional.silu(gate.float()).mul_(up).to(gate_up.dtype)
