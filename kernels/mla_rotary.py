"""Rotary embedding of latent attention, fused with the latent's norm and the write into the latent cache.

T tokens, N heads, P plain and R rotated channels, L latent, C slots of the cache.
"""

from typing import Protocol

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.mla_rotary import mla_rotary as reference_mla_rotary


class MlaRotaryFunction(Protocol):
    """The op without its checks."""

    def __call__(
        self,
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
        """The queries, their last channels rotated."""
        ...


LIBRARIES: tuple[Library[MlaRotaryFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.mla_rotary", "mla_rotary"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_mla_rotary),
)


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
    *,
    interleaved: bool,
    cache_scale: Tensor | None = None,
    library: Library[MlaRotaryFunction],
) -> Tensor:
    """The queries with their last R channels rotated; [normed latent, rotated key] goes to `slots` of the cache.

    Slot -1 is written nowhere. The norm is that of `rms_norm`, rounded once. Pairs are halves, or neighbours when
    `interleaved`, and stay where they are; rotation as in `rotary`. A library may turn `q` where it stands.

    With a `cache_scale` the cache is E4M3: what a cache in the dtype of `latent` would hold is multiplied by the
    scale's inverse in float32, cut to [-448, 448] and rounded to the nearest, ties to even. NaN stays NaN.

    Shapes: q [T, N, P + R], latent [T, L], key [T, R], weight [L], cos and sin [T, R / 2] float32 (float64 for
        float64), slots [T] int64, cache [C, L + R], cache_scale [1] float32 -> [T, N, P + R].
    Errors: ValueError for shapes or dtypes that don't fit. A slot outside the cache is the caller's fault.
    Source: DeepSeek-AI, DeepSeek-V2 (2024).
    """
    num_tokens, rotated_dim = key.shape
    angle_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    fits = (
        len(q) == len(latent) == num_tokens
        and q.dim() == 3
        and q.shape[2] >= rotated_dim
        and rotated_dim % 2 == 0
        and cache.dim() == 2
        and cache.shape[1] == latent.shape[1] + rotated_dim
        and cos.shape == sin.shape == (num_tokens, rotated_dim // 2)
        and slots.shape == (num_tokens,)
        and weight.shape == latent.shape[1:]
    )
    if not fits:
        shapes = ", ".join(str(list(x.shape)) for x in (q, latent, key, weight, cos, sin, slots, cache))
        raise ValueError(f"mla_rotary: shapes of q, latent, key, weight, cos, sin, slots, cache don't fit: {shapes}")
    cache_dtype = q.dtype if cache_scale is None else torch.float8_e4m3fn
    if not (
        q.dtype == latent.dtype == key.dtype == weight.dtype
        and cache.dtype == cache_dtype
        and cos.dtype == sin.dtype == angle_dtype
    ):
        dtypes = ", ".join(str(x.dtype) for x in (q, latent, key, weight, cos, sin, cache))
        raise ValueError(f"mla_rotary: dtypes of q, latent, key, weight, cos, sin, cache don't fit: {dtypes}")
    return library.function(q, latent, key, weight, eps, cos, sin, slots, cache, interleaved, cache_scale)
