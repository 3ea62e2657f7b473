"""RMSNorm of shared heads and their rotation in plain torch; the contract stands in kernels/qk_norm.py."""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import QkNorm, Rotation
from dist_infer.kernels.reference.rotary import rotary


def head_squares(qkv: Tensor, num_kv_heads: int, counts_keys: bool) -> Tensor:
    """See `dist_infer.kernels.qk_norm.head_squares`."""
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k = (_wide(part).square().sum((1, 2)) for part in (qkv[:, :num_heads], qkv[:, num_heads:-num_kv_heads]))
    return torch.stack([q, k if counts_keys else torch.zeros_like(k)], 1)


def norm_rotary(qkv: Tensor, squares: Tensor, norm: QkNorm, rotation: Rotation) -> Tensor:
    """See `dist_infer.kernels.qk_norm.norm_rotary`."""
    num_all, num_kv_heads = qkv.shape[1], rotation.k_cache.shape[1]
    q, k, v = qkv.split_with_sizes((num_all - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    parts = ((q, norm.q_weight, norm.num_q_channels), (k, norm.k_weight, norm.num_k_channels))
    normed = []
    for idx, (x, weight, num_channels) in enumerate(parts):
        scale = torch.rsqrt(squares[:, idx, None, None] / num_channels + norm.eps)
        normed.append((_wide(x) * scale).mul_(_wide(weight).view(x.shape[1:])).to(x.dtype))
    return rotary(
        torch.cat([*normed, v], 1),
        rotation.cos,
        rotation.sin,
        rotation.slots,
        rotation.k_cache,
        rotation.v_cache,
        rotation.interleaved,
        None,
        None,
        0.0,
    )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
