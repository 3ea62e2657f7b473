"""The sum over the experts of each row: the last step of a MoE layer, by itself or in front of an all-reduce.

T rows, K experts a row, D columns.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import ExpertOutputs
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.moe_finalize import moe_finalize as reference_moe_finalize

MoeFinalizeFunction: TypeAlias = Callable[[ExpertOutputs], Tensor]

LIBRARIES: tuple[Library[MoeFinalizeFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.moe_finalize", "moe_finalize"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_moe_finalize),
)


def moe_finalize(x: ExpertOutputs, *, library: Library[MoeFinalizeFunction]) -> Tensor:
    """The weighted sum of each row's experts, from k = 0 upwards, and the shared expert, rounded once.

    In float32 (float64 for float64), products rounded by themselves. What is of no expert held is left out, NaN or not.

    Shapes: -> [T, D].
    Errors: ValueError for shapes or dtypes that don't fit.
    """
    check_outputs("moe_finalize", x)
    return library.function(x)


def check_outputs(name: str, x: ExpertOutputs) -> None:
    """Errors: ValueError for shapes or dtypes that don't fit."""
    rows, top_k = x.ids.shape[-2:]
    wide = torch.float64 if x.outputs.dtype == torch.float64 else torch.float32
    fits = x.outputs.shape[:-1] == (*x.ids.shape[:-2], rows * top_k) and x.weights.shape == x.ids.shape and top_k > 0
    if not fits or x.ids.dtype != torch.int32 or x.weights.dtype != wide:
        parts = (x.outputs, x.ids, x.weights)
        raise ValueError(f"{name}: outputs, ids, weights don't fit: {[(y.dtype, list(y.shape)) for y in parts]}")
    if x.shared is not None and (x.shared.shape != x.shape or x.shared.dtype != x.outputs.dtype):
        raise ValueError(f"{name}: shared {x.shared.dtype} {list(x.shared.shape)} is not {list(x.shape)}")
