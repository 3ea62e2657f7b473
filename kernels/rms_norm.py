"""RMSNorm, with the residual addition that stands before it in a decoder. T tokens, D hidden."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.rms_norm import rms_norm as reference_rms_norm

RmsNormFunction: TypeAlias = Callable[[Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]

LIBRARIES: tuple[Library[RmsNormFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.rms_norm", "rms_norm"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_rms_norm),
)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, library: Library[RmsNormFunction]
) -> tuple[Tensor, Tensor]:
    """(norm_out, residual_out): the sum x + residual rounded to x's dtype (x itself without a residual) and its norm.

    The variance is that of the rounded sum, in float32 (float64 for float64); norm_out = sum * rsqrt(variance + eps)
    * weight is rounded once.

    Shapes: x, residual, both results [T, D]; weight [D].
    Errors: ValueError for shapes or dtypes that differ.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    check_inputs(x, weight, residual)
    return library.function(x, weight, eps, residual)


def check_inputs(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Errors: ValueError for shapes or dtypes that differ."""
    if x.dim() != 2 or weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: x {x.dtype} {list(x.shape)} does not fit weight {weight.dtype} {list(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"rms_norm: residual {residual.dtype} {list(residual.shape)} differs from x {x.dtype} {list(x.shape)}"
        )
