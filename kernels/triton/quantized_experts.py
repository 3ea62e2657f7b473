"""Experts with quantised weights, in Triton; the contract stands in kernels/quantized_experts.py.

The two ways are those of triton/moe_experts. Rows for FP8 weights are quantised by a launch of their own.
"""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation, QuantizedTensor
from dist_infer.kernels.triton.moe_align import align
from dist_infer.kernels.triton.moe_experts import sum_of_pairs
from dist_infer.kernels.triton.moe_tiles import QUANTIZED_EXPERTS_PER_PAIR, QUANTIZED_PAIRS, Tiles, quantized_tiles_for
from dist_infer.kernels.triton.quantize import quantize
from dist_infer.kernels.triton.quantized_gemm import Parts, down, gate_up
from dist_infer.kernels.triton.quantized_pairs import pair_down, pair_gate_up


def quantized_experts(
    x: Tensor | Fp8Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: QuantizedTensor,
    w_down: QuantizedTensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.quantized_experts.quantized_experts`. Ids that are no experts held count as -1."""
    num_rows, width = x.shape
    if 0 in (num_rows, expert_ids.shape[1], w_down.shape[0]):
        return torch.zeros(num_rows, width, dtype=torch.bfloat16, device=expert_ids.device)
    num_experts = w_down.shape[0] // width
    expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
    rows = _operand(x, narrow=isinstance(w_down, Fp8Tensor))
    quant_format = Parts.of(w_down).quant_format
    if are_few(expert_ids, num_experts, quant_format):
        tiles = QUANTIZED_PAIRS[quant_format]
        hidden = pair_gate_up(rows, expert_ids, w_gate_up, num_experts, tiles[0], activation)
        return pair_down(hidden, expert_ids, weights, w_down, num_experts, tiles[1])
    blocks = quantized_tiles_for(expert_ids.numel(), num_experts, quant_format)
    return experts_by_block(rows, expert_ids, weights, w_gate_up, w_down, blocks, activation)


def are_few(expert_ids: Tensor, num_experts: int, quant_format: str) -> bool:
    """Whether pairs meet in an expert too seldom for a product of matrices to pay, or there is nothing to compute."""
    return not num_experts or QUANTIZED_EXPERTS_PER_PAIR[quant_format] * expert_ids.numel() <= num_experts


def experts_by_block(
    x: Tensor | Fp8Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: QuantizedTensor,
    w_down: QuantizedTensor,
    tiles: Tiles,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """As quantized_experts, for rows that need no quantising, contiguous arguments and no empty dimension."""
    width, inner = x.shape[1], w_down.shape[1]
    num_experts, top_k = w_down.shape[0] // width, expert_ids.shape[1]
    blocks = align(expert_ids, num_experts, tiles.block_m)
    hidden = gate_up(x, w_gate_up, inner, blocks, top_k, tiles.gate_up, activation)
    return sum_of_pairs(down(hidden, w_down, width, blocks, tiles.down), expert_ids, weights, num_experts)


def _operand(x: Tensor | Fp8Tensor, *, narrow: bool) -> Tensor | Fp8Tensor:
    """What the products take."""
    if isinstance(x, Fp8Tensor) or not narrow:
        return x if isinstance(x, Fp8Tensor) else x.contiguous()
    carrier = Fp8Tensor.empty(x.shape[0], x.shape[1], Fp8Scaling.BLOCKS_1X128, device=x.device)
    quantize(x.contiguous(), carrier)
    return carrier
