"""The choice of experts in one Triton launch; the contract stands in kernels/moe_route.py.

A warp takes a token. Its experts stand as [G groups, J experts of a group], both padded to powers of two; a flat index
grows with the expert's id, so that the first of equal maxima is the smaller id. Choices are compared as integers that
order as the numbers do, which leaves one value below all of them for what is taken or padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import RoutingMethod
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

_TAKEN = tl.constexpr(-(2**31))


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    method: RoutingMethod,
    num_real: Tensor | None = None,
    held: range | None = None,
) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.moe_route.moe_route`; float32 alone."""
    num_tokens, num_experts = logits.shape
    if logits.dtype != torch.float32 or (bias is not None and bias.dtype != torch.float32):
        raise ValueError(f"moe_route: the Triton kernel takes float32 logits and biases, not {logits.dtype}")
    ids = torch.empty(num_tokens, method.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, method.top_k, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, weights
    # Without a group that is dropped there is nothing to tell groups apart for.
    num_groups = method.num_groups if method.num_kept_groups < method.num_groups else 1
    group_len = num_experts // num_groups
    _route_kernel[(num_tokens,)](
        logits,
        logits if bias is None else bias.contiguous(),
        logits if num_real is None else num_real,
        ids,
        weights,
        logits.stride(0),
        logits.stride(1),
        method.renorm_epsilon,
        method.scaling_factor,
        HAS_BIAS=bias is not None,
        HAS_PADDING=num_real is not None,
        SOFTMAX=method.scoring == "softmax",
        RENORMALISE=method.renormalise,
        TOP_K=method.top_k,
        K_BLOCK=triton.next_power_of_2(method.top_k),
        GROUPS=num_groups,
        GROUP_LEN=group_len,
        GROUP_BLOCK=triton.next_power_of_2(num_groups),
        EXPERT_BLOCK=triton.next_power_of_2(group_len),
        KEPT=method.num_kept_groups if num_groups > 1 else 1,
        BEST_TWO=method.group_score == "top2_sum" and group_len > 1,
        UNIFORM=method.uniform,
        FIRST_HELD=0 if held is None else held.start,
        END_HELD=num_experts if held is None else held.stop,
        num_warps=1,
        **overlapping(logits),
    )
    return ids, weights


@triton.jit
def _route_kernel(
    logits,
    bias,
    num_real,
    ids,
    weights,
    row_stride,
    expert_stride,
    epsilon,
    scaling,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    BEST_TWO: tl.constexpr,
    UNIFORM: tl.constexpr,
    FIRST_HELD: tl.constexpr,
    END_HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_BLOCK)
    at = row * TOP_K + slot
    num_rows = tl.load(num_real) if HAS_PADDING else row + 1
    if row >= num_rows:
        tl.store(ids + at, -1, mask=slot < TOP_K)
        tl.store(weights + at, 0.0, mask=slot < TOP_K)
        return
    group = tl.arange(0, GROUP_BLOCK)[:, None]
    member = tl.arange(0, EXPERT_BLOCK)[None, :]
    expert = group * GROUP_LEN + member
    exists = (group < GROUPS) & (member < GROUP_LEN)
    logit = tl.load(logits + row * row_stride + expert * expert_stride, mask=exists, other=-float("inf"))
    if SOFTMAX:
        power = tl.exp(logit - tl.max(logit))
        score = power / tl.sum(power)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=exists, other=0.0)
    if UNIFORM:
        choice = _noise(row, expert)
    choice = tl.where(exists & (choice == choice), choice, -float("inf"))
    if KEPT < GROUPS:
        choice = _only_best_groups(choice, group, exists, KEPT, BEST_TWO)
    key = tl.reshape(tl.where(exists, _ordered(choice), _TAKEN), GROUP_BLOCK * EXPERT_BLOCK)
    expert = tl.reshape(expert, GROUP_BLOCK * EXPERT_BLOCK)
    score = tl.reshape(score, GROUP_BLOCK * EXPERT_BLOCK)
    place = tl.arange(0, GROUP_BLOCK * EXPERT_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    weight = tl.zeros([K_BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        taken = place == tl.argmax(key, 0)
        chosen = tl.where(slot == k, tl.sum(tl.where(taken, expert, 0)), chosen)
        weight = tl.where(slot == k, tl.sum(tl.where(taken, score, 0.0)), weight)
        key = tl.where(taken, _TAKEN, key)
    if RENORMALISE:
        weight /= tl.sum(weight) + epsilon
    chosen = tl.where((chosen >= FIRST_HELD) & (chosen < END_HELD), chosen - FIRST_HELD, -1)
    tl.store(ids + at, chosen, mask=slot < TOP_K)
    tl.store(weights + at, weight * scaling, mask=slot < TOP_K)


@triton.jit
def _ordered(x):
    """Integers that order as the numbers do, both zeros alike. x is no NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _noise(row, expert):
    """As in the reference: a number in [0, 1) that depends on row and expert alone."""
    x = row.to(tl.uint32) * 0x9E3779B1 + expert.to(tl.uint32) * 0x85EBCA6B
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return (x >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _only_best_groups(choice, group, exists, KEPT: tl.constexpr, BEST_TWO: tl.constexpr):
    best = tl.max(choice, 1, keep_dims=True)
    if BEST_TWO:
        member = tl.arange(0, choice.shape[1])[None, :]
        first = tl.argmax(choice, 1, keep_dims=True)
        best += tl.max(tl.where(member == first, -float("inf"), choice), 1, keep_dims=True)
    best = tl.where(best == best, best, -float("inf"))
    key = tl.where(tl.max(exists.to(tl.int32), 1, keep_dims=True) > 0, _ordered(best), _TAKEN)
    kept = tl.zeros_like(key)
    for _ in tl.static_range(KEPT):
        taken = group == tl.argmax(key, 0, keep_dims=True)
        kept = tl.where(taken, 1, kept)
        key = tl.where(taken, _TAKEN, key)
    return tl.where(kept > 0, choice, -float("inf"))
