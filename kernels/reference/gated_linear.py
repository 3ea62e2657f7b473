"""The product of gates and ups with its activation in plain torch; the contract stands in kernels/gated_linear.py."""

from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.reference.linear import linear
from dist_infer.kernels.reference.silu_mul import silu_mul


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: GatedActivation = GatedActivation.SILU
) -> Tensor:
    """See `dist_infer.kernels.gated_linear.gated_linear`."""
    return silu_mul(linear(x, weight, bias), activation)
