"""A dense matrix product with an optional bias. T tokens, K inputs, N outputs."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.dispatch import Library, Target, deferred, on_triton
from dist_infer.kernels.onednn.linear import linear as onednn_linear
from dist_infer.kernels.onednn.linear import pack, runs_onednn
from dist_infer.kernels.reference.linear import linear as reference_linear

LinearFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def takes_few_rows(target: Target) -> str | None:
    """`is_available` of the Triton products: few rows are its own, the rest of a 16-bit model cuBLAS's."""
    reason = on_triton(target)
    if reason is None and target.dtype.itemsize != 2:
        reason = f"{str(target.dtype).removeprefix('torch.')} is cuBLAS's"
    return reason


LIBRARIES: tuple[Library[LinearFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.linear", "linear"),
        is_available=takes_few_rows,
        graph_safe=True,
    ),
    Library(name="onednn", function=onednn_linear, is_available=runs_onednn, graph_safe=True, prepare=pack),
    Library(name="torch", function=reference_linear, graph_safe=True),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, library: Library[LinearFunction]) -> Tensor:
    """x W^T + bias, accumulated in at least float32; K = 0 gives the bias.

    Shapes: x [T, K], weight [N, K], bias [N] -> [T, N], contiguous.
    Errors: ValueError for shapes or dtypes that don't fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"linear: x {x.dtype} {list(x.shape)} does not fit weight {weight.dtype} {list(weight.shape)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"linear: bias {bias.dtype} {list(bias.shape)} does not fit weight {list(weight.shape)}")
    return library.function(x, weight, bias)
