"""The sum over the experts of each row in plain torch; the contract stands in kernels/moe_finalize.py."""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import ExpertOutputs


def moe_finalize(x: ExpertOutputs) -> Tensor:
    """See `dist_infer.kernels.moe_finalize.moe_finalize`."""
    outputs = x.outputs.view(*x.ids.shape, x.outputs.shape[-1])
    total = torch.zeros(x.shape, dtype=x.weights.dtype, device=outputs.device)
    for k in range(x.ids.shape[1]):
        is_held = (x.ids[:, k] >= 0) & (x.ids[:, k] < x.num_experts)
        product = x.weights[:, k, None] * outputs[:, k].to(total.dtype)
        total += torch.where(is_held[:, None], product, torch.zeros_like(product))
    if x.shared is not None:
        total += x.shared
    return total.to(outputs.dtype)
