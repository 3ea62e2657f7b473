"""The matrix product of gates and ups with the activation behind it. T tokens, K inputs, I channels."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library, deferred
from dist_infer.kernels.linear import takes_few_rows
from dist_infer.kernels.reference.gated_linear import gated_linear as reference_gated_linear

GatedLinearFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, GatedActivation], Tensor]

LIBRARIES: tuple[Library[GatedLinearFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.linear", "gated_linear"),
        is_available=takes_few_rows,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_gated_linear, graph_safe=True),
)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: GatedActivation = GatedActivation.SILU,
    library: Library[GatedLinearFunction],
) -> Tensor:
    """The activation of the product x W^T + bias: `kernels/linear`, rounded, then `kernels/silu_mul`.

    Shapes: x [T, K], weight [2 * I, K] and bias [2 * I], the gates first -> [T, I].
    Errors: ValueError for shapes or dtypes that don't fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"gated_linear: x {x.dtype} {list(x.shape)} does not fit weight {weight.dtype} {list(weight.shape)}"
        )
    if weight.shape[0] % 2 or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype)):
        raise ValueError(f"gated_linear: weight {list(weight.shape)} is not gates and ups, or its bias does not fit")
    return library.function(x, weight, bias, activation)
