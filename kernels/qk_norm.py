"""RMSNorm over all query heads and over all key heads of a token, of which each rank holds some, and the rotation.

Sums of squares of the heads held, then, once they are added up over the ranks, the rest; through memory that all GPUs
of a host map, all of it in one kernel. T tokens, N and K query and KV heads of this rank, H head dim, R rotated
channels, C slots of the cache.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.all_reduce import DTYPES, PeerSpace
from dist_infer.kernels.carriers import QkNorm, Rotation
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference import qk_norm as reference
from dist_infer.kernels.rotary import check_rotation

SquaresFunction: TypeAlias = Callable[[Tensor, int, bool], Tensor]
NormRotaryFunction: TypeAlias = Callable[[Tensor, Tensor, QkNorm, Rotation], Tensor]
ReducedNormFunction: TypeAlias = Callable[[Tensor, QkNorm, Rotation, PeerSpace], Tensor]


def _triton(name: str, *, module: str = "qk_norm") -> Callable[..., Tensor]:
    return deferred(f"dist_infer.kernels.triton.{module}", name)


SQUARES_LIBRARIES: tuple[Library[SquaresFunction], ...] = (
    Library(name="triton", function=_triton("head_squares"), is_available=on_triton, graph_safe=True),
    Library(name="torch", function=reference.head_squares),
)
NORM_ROTARY_LIBRARIES: tuple[Library[NormRotaryFunction], ...] = (
    Library(name="triton", function=_triton("norm_rotary"), is_available=on_triton, graph_safe=True),
    Library(name="torch", function=reference.norm_rotary),
)
ONE_SHOT_LIBRARIES: tuple[Library[ReducedNormFunction], ...] = (
    Library(
        name="triton",
        function=_triton("reduced_norm_rotary", module="reduced_qk_norm"),
        is_available=on_triton,
        graph_safe=True,
    ),
)


def head_squares(qkv: Tensor, num_kv_heads: int, *, counts_keys: bool, library: Library[SquaresFunction]) -> Tensor:
    """The sums of squares of a token's query heads and of its key heads, in float32 (float64 for float64).

    Shapes: qkv [T, N + 2 * K, H] (queries, keys, values) -> [T, 2]; the second is 0 where keys don't count.
    Errors: ValueError for another shape.
    """
    if qkv.dim() != 3 or not 0 < 2 * num_kv_heads < qkv.shape[1]:
        raise ValueError(f"head_squares: qkv {list(qkv.shape)} is not [tokens, heads of three kinds, channels]")
    return library.function(qkv, num_kv_heads, counts_keys)


def norm_rotary(
    qkv: Tensor, squares: Tensor, norm: QkNorm, rotation: Rotation, *, library: Library[NormRotaryFunction]
) -> Tensor:
    """Queries and keys x * rsqrt(squares / channels of all ranks + eps) * weight, rounded, and then kernels/rotary.

    Shapes: qkv [T, N + 2 * K, H], squares [T, 2], of all ranks, float32 (float64 for float64) -> [T, N, H].
    Errors: ValueError for shapes or dtypes that don't fit.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    _check(qkv, norm, rotation)
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    if squares.shape != (len(qkv), 2) or squares.dtype != wide:
        raise ValueError(f"norm_rotary: squares {squares.dtype} {list(squares.shape)} are not {wide} [{len(qkv)}, 2]")
    return library.function(qkv, squares, norm, rotation)


def reduced_norm_rotary(
    qkv: Tensor, norm: QkNorm, rotation: Rotation, space: PeerSpace, *, library: Library[ReducedNormFunction]
) -> Tensor:
    """`head_squares`, the sum over the ranks as comm/collectives has it, `norm_rotary`: byte for byte, in one kernel.

    Takes the places and turns of one_shot in `space`, 16 bytes of each row.

    Shapes: as norm_rotary; where one launch is several ranks', qkv, weights, caches and result are [ranks, ...].
    Ranks: all of `space`, with the same T and the same sequence of calls, one stream a space.
    Errors: ValueError for what doesn't fit, or more rows than the space has.
    """
    local = range(space.num_local)
    if space.memory.dim() == 2 and not len(qkv) == len(norm.q_weight) == len(rotation.k_cache) == len(local):
        raise ValueError(f"reduced_norm_rotary: qkv {list(qkv.shape)} is not of {len(local)} ranks")
    for rank in local if space.memory.dim() == 2 else ():
        _check(qkv[rank], *_of_rank(norm, rotation, rank))
    if space.memory.dim() == 1:
        _check(qkv, norm, rotation)
    if qkv.dtype not in DTYPES or not qkv.is_contiguous() or len(norm.counts_keys) != len(local):
        raise ValueError(
            f"reduced_norm_rotary: qkv {qkv.dtype} {list(qkv.shape)} is no contiguous tensor of a float type"
        )
    if qkv.shape[-3] > space.layout.one_shot_rows:
        raise ValueError(f"reduced_norm_rotary: {qkv.shape[-3]} rows are more than {space.layout.one_shot_rows}")
    return library.function(qkv, norm, rotation, space)


def _of_rank(norm: QkNorm, rotation: Rotation, rank: int) -> tuple[QkNorm, Rotation]:
    return (
        replace(norm, q_weight=norm.q_weight[rank], k_weight=norm.k_weight[rank]),
        replace(rotation, k_cache=rotation.k_cache[rank], v_cache=rotation.v_cache[rank]),
    )


def _check(qkv: Tensor, norm: QkNorm, rotation: Rotation) -> None:
    places = (rotation.cos, rotation.sin, rotation.slots, rotation.k_cache, rotation.v_cache)
    check_rotation("norm_rotary", qkv, *places)
    num_kv_heads, head_dim = rotation.k_cache.shape[1:]
    widths = ((qkv.shape[1] - 2 * num_kv_heads) * head_dim, num_kv_heads * head_dim)
    for weight, width in zip((norm.q_weight, norm.k_weight), widths, strict=True):
        if weight.shape != (width,) or weight.dtype != qkv.dtype:
            raise ValueError(f"norm_rotary: weight {weight.dtype} {list(weight.shape)} is not {qkv.dtype} [{width}]")
