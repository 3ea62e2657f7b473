"""Experts with quantised weights in plain torch; the contract stands in kernels/quantized_experts.py."""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation, QuantizedTensor
from dist_infer.kernels.reference.quantize import dequantize, quantize
from dist_infer.kernels.reference.silu_mul import silu_mul


def quantized_experts(
    x: Tensor | Fp8Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: QuantizedTensor,
    w_down: QuantizedTensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.quantized_experts.quantized_experts`."""
    width, inner = x.shape[1], w_down.shape[1]
    num_experts = w_down.shape[0] // width
    dtype = torch.bfloat16 if isinstance(x, Fp8Tensor) else x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    narrow = isinstance(w_down, Fp8Tensor)
    gate_up = dequantize(w_gate_up, wide).view(num_experts, 2 * inner, width)
    down = dequantize(w_down, wide).view(num_experts, width, inner)
    rows = _operand(x, wide, narrow=narrow)
    total = torch.zeros_like(rows)
    for k in range(expert_ids.shape[1]):
        for expert in set(expert_ids[:, k].tolist()):
            if not 0 <= expert < num_experts:
                continue
            taken = (expert_ids[:, k] == expert).nonzero().squeeze(1)
            hidden = silu_mul(rows[taken] @ gate_up[expert].T, activation).to(dtype)
            output = (_operand(hidden, wide, narrow=narrow) @ down[expert].T).to(dtype)
            total[taken] += weights[taken, k, None] * output.to(wide)
    return total.to(dtype)


def _operand(x: Tensor | Fp8Tensor, wide: torch.dtype, *, narrow: bool) -> Tensor:
    """The values that the product takes."""
    if narrow and not isinstance(x, Fp8Tensor):
        carrier = Fp8Tensor.empty(x.shape[0], x.shape[1], Fp8Scaling.BLOCKS_1X128, device=x.device)
        quantize((x if x.dtype != torch.float64 else x.float()).contiguous(), carrier)
        x = carrier
    return dequantize(x, wide) if isinstance(x, Fp8Tensor) else x.to(wide)
