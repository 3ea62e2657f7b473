"""Rotation and write of latent attention in plain torch; the contract stands in kernels/mla_rotary.py."""

import torch
from torch import Tensor

from dist_infer.kernels.reference.quantize import to_e4m3
from dist_infer.kernels.reference.rms_norm import rms_norm
from dist_infer.kernels.reference.rotary import rotate, write_rows


def mla_rotary(
    q: Tensor,
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
    cache_scale: Tensor | None,
) -> Tensor:
    """See `dist_infer.kernels.mla_rotary.mla_rotary`."""
    plain_dim = q.shape[2] - key.shape[1]
    turned = rotate(q[..., plain_dim:], cos, sin, interleaved=interleaved)
    turned_key = rotate(key[:, None], cos, sin, interleaved=interleaved)[:, 0]
    normed, _ = rms_norm(latent, weight, eps, None)
    rows = torch.cat([normed, turned_key], 1)
    if cache_scale is None:
        write_rows(cache, slots, rows)
    else:
        write_rows(cache.view(torch.uint8), slots, to_e4m3(rows.float() * (1 / cache_scale)).view(torch.uint8))
    return torch.cat([q[..., :plain_dim], turned], -1)
