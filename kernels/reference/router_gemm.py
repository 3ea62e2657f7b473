"""Logits of a router in plain torch; the contract stands in kernels/router_gemm.py."""

from torch import Tensor
from torch.nn import functional


def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """See `dist_infer.kernels.router_gemm.router_gemm`. On a GPU it trusts that torch was not told to use TF32."""
    return functional.linear(x.to(weight.dtype), weight)
