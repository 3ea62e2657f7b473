"""RMSNorm in plain torch; the contract stands in kernels/rms_norm.py."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.rms_norm.rms_norm`."""
    total = x if residual is None else x + residual
    if x.dtype in (torch.float32, torch.float64):
        scale = torch.rsqrt(total.square().mean(-1, keepdim=True).add_(eps))
        return (total * scale).mul_(weight), total
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return wide.mul_(scale).mul_(weight.float()).to(x.dtype), total
