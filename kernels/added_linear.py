"""A dense matrix product added to something. T tokens, K inputs, N outputs."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred
from dist_infer.kernels.linear import takes_few_rows
from dist_infer.kernels.reference.added_linear import added_linear as reference_added_linear

AddedLinearFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]

LIBRARIES: tuple[Library[AddedLinearFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.linear", "added_linear"),
        is_available=takes_few_rows,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_added_linear, graph_safe=True),
)


def added_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor, *, library: Library[AddedLinearFunction]
) -> Tensor:
    """x W^T + bias as kernels/linear has it, rounded; then + added, rounded.

    Shapes: x [T, K], weight [N, K], bias [N], added [T, N] -> [T, N], contiguous.
    Errors: ValueError for shapes or dtypes that don't fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"added_linear: x {x.dtype} {list(x.shape)} does not fit weight {weight.dtype} {list(weight.shape)}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"added_linear: bias {bias.dtype} {list(bias.shape)} does not fit {list(weight.shape)}")
    if added.shape != (len(x), len(weight)) or added.dtype != x.dtype:
        raise ValueError(f"added_linear: {added.dtype} {list(added.shape)} can't be added to {len(x)} x {len(weight)}")
    return library.function(x, weight, bias, added.contiguous())
