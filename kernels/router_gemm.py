"""Logits of a router: activations of any float dtype, weights in float32 or float64. T tokens, D hidden, E experts."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.router_gemm import router_gemm as reference_router_gemm

RouterGemmFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]

LIBRARIES: tuple[Library[RouterGemmFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.router_gemm", "router_gemm"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_router_gemm),
)


def router_gemm(x: Tensor, weight: Tensor, *, library: Library[RouterGemmFunction]) -> Tensor:
    """x W^T in the dtype of the weight: activations are widened exactly, products and sums are not rounded to less.

    A logit that is off by a little chooses another expert, so TF32 is never used. Errors are at most those of a plain
    float32 product.

    Shapes: x [T, D], weight [E, D] -> [T, E].
    Errors: ValueError for shapes that don't fit, for a weight narrower than float32 or than x.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"router_gemm: x {list(x.shape)} does not fit weight {list(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.float64) or torch.promote_types(x.dtype, weight.dtype) != weight.dtype:
        raise ValueError(f"router_gemm: x {x.dtype} meets weight {weight.dtype}, which must be wide")
    return library.function(x, weight)
