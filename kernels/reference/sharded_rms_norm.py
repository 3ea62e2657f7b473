"""RMSNorm of channels that several ranks share in plain torch; the contract stands in kernels/sharded_rms_norm.py."""

import torch
from torch import Tensor


def square_sum(x: Tensor) -> Tensor:
    """See `dist_infer.kernels.sharded_rms_norm.square_sum`."""
    return _wide(x).square().sum(-1)


def scale_rows(x: Tensor, square_sums: Tensor, num_channels: int, weight: Tensor, eps: float) -> Tensor:
    """See `dist_infer.kernels.sharded_rms_norm.scale_rows`."""
    scale = torch.rsqrt(square_sums[:, None] / num_channels + eps)
    return (_wide(x) * scale).mul_(_wide(weight)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
