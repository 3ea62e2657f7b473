"""The experts that a rank holds, in Triton; the contract stands in kernels/moe_experts.py.

With few pairs of a row and an expert each pair is computed by itself. Else pairs are put in the order of their experts,
two grouped products run over blocks of them, and a last launch adds up each row. All grids follow from shapes.
"""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import ExpertOutputs, GatedActivation
from dist_infer.kernels.triton.grouped_gemm import down, gate_up
from dist_infer.kernels.triton.moe_align import align
from dist_infer.kernels.triton.moe_finalize import moe_finalize
from dist_infer.kernels.triton.moe_pairs import experts_by_pair, outputs_by_pair
from dist_infer.kernels.triton.moe_tiles import Tiles, tiles_for


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
    *,
    tiles: int | None = None,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.moe_experts`. Ids that are no experts held count as -1.

    `tiles` is a place in the list of moe_tiles; None: as measured on an H200, few pairs one by one.
    """
    num_experts, width, inner = w_down.shape
    if 0 in (len(x), width, inner, num_experts, expert_ids.shape[1]):
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    args = (x.contiguous(), expert_ids.contiguous(), weights.contiguous(), w_gate_up.contiguous(), w_down.contiguous())
    if tiles is None and by_pair(expert_ids.numel(), num_experts):
        return experts_by_pair(*args, activation)
    return experts_by_block(*args, tiles_for(expert_ids.numel(), num_experts, x.element_size(), tiles), activation)


def expert_outputs(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
    *,
    tiles: int | None = None,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.expert_outputs`. Ids that are no experts held count as -1; `tiles` as above.

    Shapes: -> [R * K, D].
    """
    num_experts, width, inner = w_down.shape
    if 0 in (len(x), width, inner, num_experts, expert_ids.shape[1]):
        return x.new_zeros(expert_ids.numel(), width)
    args = (x.contiguous(), expert_ids.contiguous(), w_gate_up.contiguous(), w_down.contiguous())
    if tiles is None and by_pair(expert_ids.numel(), num_experts):
        return outputs_by_pair(*args, activation)
    return outputs_by_block(*args, tiles_for(expert_ids.numel(), num_experts, x.element_size(), tiles), activation)


def by_pair(num_pairs: int, num_experts: int) -> bool:
    """Whether pairs meet in an expert too seldom for a product of matrices to pay."""
    return 2 * num_pairs < num_experts


def experts_by_block(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    tiles: Tiles,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """As moe_experts, for contiguous arguments and no empty dimension."""
    outputs = outputs_by_block(x, expert_ids, w_gate_up, w_down, tiles, activation)
    return sum_of_pairs(outputs, expert_ids, weights, len(w_down))


def outputs_by_block(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    tiles: Tiles,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """As expert_outputs, for contiguous arguments and no empty dimension."""
    blocks = align(expert_ids, len(w_down), tiles.block_m)
    hidden = gate_up(x, w_gate_up, blocks, expert_ids.shape[1], tiles.gate_up, activation)
    return down(hidden, w_down, blocks, tiles.down)


def sum_of_pairs(outputs: Tensor, expert_ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """The weighted sum of each row's outputs, over k upwards in float32; those of no expert held are left out.

    Shapes: outputs [R * K, D], expert_ids and weights [R, K] -> [R, D].
    """
    x = ExpertOutputs(outputs=outputs, ids=expert_ids, weights=weights, num_experts=num_experts)
    return moe_finalize(x)
