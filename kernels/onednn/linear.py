"""A dense matrix product by oneDNN, the weight in blocks; the contract stands in kernels/linear.py.

For every product torch copies the weight into the order of its kernel, which at few rows costs more than the product.
Here that is done once.
"""

import platform
from typing import Any

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Target

_BACKEND: Any = torch.backends.mkldnn
_ROWS = 16  # the blocks are best for about so many rows; any number is right


def runs_onednn(target: Target) -> str | None:
    """`is_available`: a CPU with instructions for this dtype, and a weight that isn't empty."""
    if target.device.type != "cpu":
        return f"needs a CPU, not {target.device.type}"
    if platform.machine() != "x86_64" or not _BACKEND.is_available():
        return f"this torch has no oneDNN for {platform.machine()}"
    if target.dtype not in (torch.float32, torch.bfloat16):
        return f"takes float32 and bfloat16, not {str(target.dtype).removeprefix('torch.')}"
    if target.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no instructions for bfloat16"
    return "the weight is empty" if 0 in target.geometry.values() else None


def pack(weight: Tensor) -> Tensor:
    """The weight in blocks, of the same size; only oneDNN can read it.

    Shapes: [N, K] -> [N, K].
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `dist_infer.kernels.linear.linear`. A weight that isn't packed is right too, and slower."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
