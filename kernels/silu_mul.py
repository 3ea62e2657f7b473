"""The gated activation of a dense MLP. T tokens, I intermediate."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.silu_mul import silu_mul as reference_silu_mul

SiluMulFunction: TypeAlias = Callable[[Tensor, GatedActivation], Tensor]

LIBRARIES: tuple[Library[SiluMulFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.silu_mul", "silu_mul"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_silu_mul),
)


def silu_mul(
    gate_up: Tensor,
    *,
    activation: GatedActivation = GatedActivation.SILU,
    library: Library[SiluMulFunction],
) -> Tensor:
    """silu(gate) * up, or another activation of them, in float32 (float64 for float64), rounded once.

    Shapes: gate_up [T, 2 * I], the gates first -> [T, I].
    Errors: ValueError for an odd width.
    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: {list(gate_up.shape)} is not [tokens, 2 * intermediate]")
    return library.function(gate_up, activation)
