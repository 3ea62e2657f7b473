"""Experts in plain torch; the contract stands in kernels/moe_experts.py.

The (row, k) pairs are sorted by expert, so that each expert is one pair of matrix products over its rows. The number of
rows of each expert is read by the host: a wait on a GPU, nothing on a CPU.
"""

import torch
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.reference.silu_mul import silu_mul


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.moe_experts`."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    outputs, place = _expert_outputs(x, expert_ids, w_gate_up, w_down, activation)
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for k in range(expert_ids.shape[1] if len(outputs) else 0):
        rows = (expert_ids[:, k] >= 0).nonzero().squeeze(1)
        # Each row once: the order of the sum is that of k.
        total.index_add_(0, rows, outputs[place[rows, k]].to(wide).mul_(weights[rows, k, None]))
    return total.to(x.dtype)


def expert_outputs(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.expert_outputs`. Those of no expert are zeros.

    Shapes: -> [R * K, D].
    """
    outputs, place = _expert_outputs(x, expert_ids, w_gate_up, w_down, activation)
    of_pairs = x.new_zeros(expert_ids.numel(), x.shape[1])
    routed = (expert_ids >= 0).flatten()
    of_pairs[routed] = outputs[place.flatten()[routed]]
    return of_pairs


def _expert_outputs(
    x: Tensor, expert_ids: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: GatedActivation
) -> tuple[Tensor, Tensor]:
    """The unweighted outputs of all routed pairs, and where that of (row, k) stands: [R, K]."""
    num_experts, top_k = len(w_down), expert_ids.shape[1]
    flat_ids = expert_ids.flatten().long()
    order = flat_ids.argsort(stable=True)
    if flat_ids.numel():
        for extreme in (int(flat_ids.max()), int(flat_ids.min())):
            if not -1 <= extreme < num_experts:
                raise ValueError(f"moe_experts: id {extreme} is not one of the {num_experts} experts held")
    num_inert, *counts = torch.bincount(flat_ids + 1, minlength=num_experts + 1).tolist()
    outputs = x.new_empty(sum(counts), x.shape[1])
    pairs_of = torch.split(order[num_inert:], counts)
    for expert_idx, (pairs, out) in enumerate(zip(pairs_of, torch.split(outputs, counts), strict=True)):
        if len(pairs):
            hidden = silu_mul(functional.linear(x[pairs // top_k], w_gate_up[expert_idx]), activation)
            out.copy_(functional.linear(hidden, w_down[expert_idx]))
    place = torch.empty_like(order)
    place[order] = torch.arange(-num_inert, len(order) - num_inert, device=x.device)
    return outputs, place.view(expert_ids.shape)
