"""Rotary position embedding of queries and keys, fused with the norm before it and the write into the KV cache.

T tokens, N query heads, K KV heads, H head dim, R rotated channels, C slots of the cache.
"""

from typing import Protocol

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.rotary import rotary as reference_rotary


class RotaryFunction(Protocol):
    """The op without its checks."""

    def __call__(
        self,
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
        """The rotated queries."""
        ...


LIBRARIES: tuple[Library[RotaryFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.rotary", "rotary"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_rotary),
)


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    library: Library[RotaryFunction],
) -> Tensor:
    """The rotated queries; rotated keys and plain values go to `slots` of the caches, slot -1 nowhere.

    With weights each head of the queries and of the keys is first normed on its own as by `rms_norm`, and rounded.

    The first R channels of a head turn, the others stay as they are. Halves are paired, a = x[i] with b = x[i + R / 2],
    or neighbours when `interleaved`, x[2 i] with x[2 i + 1]: (a, b) -> (a cos - b sin, b cos + a sin), computed in
    float32 (float64 for float64) and rounded once.

    Shapes: qkv [T, N + 2 * K, H] (queries, keys, values), cos and sin [T, R / 2] float32 (float64 for float64), R <= H,
        slots [T] int64, caches [C, K, H], q_weight and k_weight [H], both or none -> [T, N, H].
    Errors: ValueError for shapes or dtypes that don't fit. A slot outside the cache is the caller's fault and not
        looked for.
    Source: Su et al., RoFormer (2021); the halves as in GPT-NeoX.
    """
    check_rotation("rotary", qkv, cos, sin, slots, k_cache, v_cache)
    head_dim = qkv.shape[2]
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    if len(weights) == 1 or any(weight.shape != (head_dim,) or weight.dtype != qkv.dtype for weight in weights):
        found = ", ".join(f"{weight.dtype} {list(weight.shape)}" for weight in weights)
        raise ValueError(f"rotary: weights of the norm, both or none, must be {qkv.dtype} [{head_dim}]: {found}")
    return library.function(qkv, cos, sin, slots, k_cache, v_cache, interleaved, q_weight, k_weight, eps)


def check_rotation(
    name: str, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """What every op asks that turns heads and writes them; shapes as in `rotary`.

    Errors: ValueError for shapes or dtypes that don't fit.
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
        raise ValueError(f"{name}: shapes of qkv, cos, sin, slots, k_cache, v_cache don't fit: {shapes}")
    if not (qkv.dtype == k_cache.dtype == v_cache.dtype and cos.dtype == sin.dtype == angle_dtype):
        dtypes = ", ".join(str(x.dtype) for x in (qkv, cos, sin, k_cache, v_cache))
        raise ValueError(f"{name}: dtypes of qkv, cos, sin, k_cache, v_cache don't fit: {dtypes}")
