"""The choice of experts in plain torch; the contract stands in kernels/moe_route.py."""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import RoutingMethod
from dist_infer.kernels.reference.top_k import top_k


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    method: RoutingMethod,
    num_real: Tensor | None = None,
    held: range | None = None,
) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.moe_route.moe_route`."""
    scores = logits.softmax(1) if method.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if method.uniform:
        choice = _noise(logits)
    if method.num_kept_groups < method.num_groups:
        choice = _only_best_groups(choice, method)
    ids = top_k(choice, method.top_k)[1]
    weights = scores.gather(1, ids)
    if method.renormalise:
        weights = weights / (weights.sum(1, keepdim=True) + method.renorm_epsilon)
    ids, weights = ids.int(), weights * method.scaling_factor
    if held is not None:
        ids = torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, -1)
    if num_real is None:
        return ids, weights
    padding = (torch.arange(len(ids), device=ids.device) >= num_real)[:, None]
    return ids.masked_fill(padding, -1), weights.masked_fill(padding, 0)


def _noise(logits: Tensor) -> Tensor:
    """Numbers in [0, 1) by a 32-bit hash of row and expert, in the shape and dtype of the logits."""
    row, expert = (torch.arange(size, device=logits.device) for size in logits.shape)
    x = (row[:, None] * 0x9E3779B1 + expert * 0x85EBCA6B) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 8).to(logits.dtype) / 2**24


def _only_best_groups(choice: Tensor, method: RoutingMethod) -> Tensor:
    """Experts of other groups count as -inf."""
    num_tokens, num_experts = choice.shape
    choice = choice.masked_fill(choice.isnan(), -torch.inf)
    grouped = choice.view(num_tokens, method.num_groups, num_experts // method.num_groups)
    num_best = 1 if method.group_score == "max" else min(2, grouped.shape[2])
    group_scores = grouped.topk(num_best, dim=2).values.sum(2)
    kept = top_k(group_scores, method.num_kept_groups)[1]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
