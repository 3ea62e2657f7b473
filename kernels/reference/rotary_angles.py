"""Angles of the rotary embedding in plain torch; the contract stands in kernels/rotary_angles.py."""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.rotary_angles.rotary_angles`."""
    angles = positions.double()[:, None] * frequencies
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
