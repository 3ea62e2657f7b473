"""Rotary position embedding and KV write in plain torch; the contract stands in kernels/rotary.py."""

import torch
from torch import Tensor

from dist_infer.kernels.reference.rms_norm import rms_norm


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """See `dist_infer.kernels.rotary.rotary`."""
    num_kv_heads = k_cache.shape[1]
    num_rotated = qkv.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    if q_weight is not None and k_weight is not None:
        q, k, v = qkv.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        qkv = torch.cat([_norm_heads(q, q_weight, eps), _norm_heads(k, k_weight, eps), v], 1)
    rotated = rotate(qkv[:, :num_rotated], cos, sin, interleaved=interleaved)
    write_rows(k_cache, slots, rotated[:, num_heads:])
    write_rows(v_cache, slots, qkv[:, num_rotated:])
    return rotated[:, :num_heads]


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.reshape(-1, x.shape[2]), weight, eps, None)[0].view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """The first channels of each head turned, as many as there are angles for; the others as they are.

    Shapes: x [T, N, H], cos and sin [T, R / 2], R <= H -> [T, N, H], contiguous.
    """
    half = cos.shape[1]
    wide = x.to(cos.dtype)
    cos, sin = cos[:, None], sin[:, None]
    out = torch.empty_like(wide, memory_format=torch.contiguous_format)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    low, high = wide[..., first], wide[..., second]
    torch.mul(low, cos, out=out[..., first]).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out[..., second]).addcmul_(low, sin)
    out[..., 2 * half :] = wide[..., 2 * half :]
    return out.to(x.dtype)


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Row i goes to slot slots[i] of the cache; -1 nowhere."""
    # The test waits for the device on CUDA: a reference may.
    if slots.numel() and bool(slots.min() < 0):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots, rows = slots[kept], rows[kept]
    cache.index_copy_(0, slots, rows)
