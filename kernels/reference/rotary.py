"""Rotary position embedding and KV write in plain torch; the contract stands in kernels/rotary.py."""

import torch
from torch import Tensor


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """See `dist_infer.kernels.rotary.rotary`."""
    num_kv_heads = k_cache.shape[1]
    num_rotated = qkv.shape[1] - num_kv_heads
    num_heads = num_rotated - num_kv_heads
    rotated = _rotate(qkv[:, :num_rotated], cos, sin)
    _write(k_cache, slots, rotated[:, num_heads:])
    _write(v_cache, slots, qkv[:, num_rotated:])
    return rotated[:, :num_heads]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[2] // 2
    wide = x.to(cos.dtype)
    low, high = wide[..., :half], wide[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    out = torch.empty_like(wide, memory_format=torch.contiguous_format)
    torch.mul(low, cos, out=out[..., :half]).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out[..., half:]).addcmul_(low, sin)
    return out.to(x.dtype)


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    # The test waits for the device on CUDA: a reference may.
    if slots.numel() and bool(slots.min() < 0):
        kept = (slots >= 0).nonzero().squeeze(1)
        slots, rows = slots[kept], rows[kept]
    cache.index_copy_(0, slots, rows)
