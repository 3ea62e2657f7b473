"""A dense matrix product in plain torch; the contract stands in kernels/linear.py."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `dist_infer.kernels.linear.linear`."""
    return functional.linear(x, weight, bias)
