"""Rotary position embedding of queries and keys, fused with the write into the KV cache.

T tokens, N query heads, K KV heads, H head dim, R rotated channels, C slots of the cache.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.reference.rotary import rotary as reference_rotary

RotaryFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Tensor]

LIBRARIES: tuple[Library[RotaryFunction], ...] = (Library(name="torch", function=reference_rotary),)


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    interleaved: bool = False,
    library: Library[RotaryFunction],
) -> Tensor:
    """The rotated queries; rotated keys and plain values go to `slots` of the caches, slot -1 nowhere.

    The first R channels of a head turn, the others stay as they are. Halves are paired, a = x[i] with b = x[i + R / 2],
    or neighbours when `interleaved`, x[2 i] with x[2 i + 1]: (a, b) -> (a cos - b sin, b cos + a sin), computed in
    float32 (float64 for float64) and rounded once.

    Shapes: qkv [T, N + 2 * K, H] (queries, keys, values), cos and sin [T, R / 2] float32 (float64 for float64), R <= H,
        slots [T] int64, caches [C, K, H] -> [T, N, H].
    Errors: ValueError for shapes or dtypes that don't fit. A slot outside the cache is the caller's fault and not
        looked for.
    Source: Su et al., RoFormer (2021); the halves as in GPT-NeoX.
    """
    num_tokens, num_heads, head_dim = qkv.shape
    angle_dtype = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    fits = (
        k_cache.shape == v_cache.shape
        and k_cache.dim() == 3
        and k_cache.shape[2] == head_dim
        and 2 * k_cache.shape[1] < num_heads
        and cos.shape == sin.shape == (num_tokens, cos.shape[-1])
        and 0 < 2 * cos.shape[-1] <= head_dim
        and slots.shape == (num_tokens,)
    )
    if not fits:
        shapes = ", ".join(str(list(x.shape)) for x in (qkv, cos, sin, slots, k_cache, v_cache))
        raise ValueError(f"rotary: shapes of qkv, cos, sin, slots, k_cache, v_cache don't fit: {shapes}")
    if not (qkv.dtype == k_cache.dtype == v_cache.dtype and cos.dtype == sin.dtype == angle_dtype):
        dtypes = ", ".join(str(x.dtype) for x in (qkv, cos, sin, k_cache, v_cache))
        raise ValueError(f"rotary: dtypes of qkv, cos, sin, k_cache, v_cache don't fit: {dtypes}")
    return library.function(qkv, cos, sin, slots, k_cache, v_cache, interleaved)
