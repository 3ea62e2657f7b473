"""Experts with quantised weights and grouped products of CuTe DSL; the contract stands in kernels/quantized_experts.py.

Few pairs are put in the order of their experts by the products themselves, many by launches of their own. The kernels
of kernels/triton quantise rows or put their channels in place, add up rows, and compute the products of so few pairs
that each is by itself.
"""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation, QuantizedTensor
from dist_infer.kernels.cute.moe_align import align
from dist_infer.kernels.cute.moe_order import MAX_ORDERED
from dist_infer.kernels.cute.quantized_forms import Form, are_too_few, forms_for
from dist_infer.kernels.cute.quantized_gemm import down, format_of, gate_up
from dist_infer.kernels.cute.quantized_parts import DEPTH, Variant
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.kernels.triton.channel_places import in_places
from dist_infer.kernels.triton.moe_experts import sum_of_pairs
from dist_infer.kernels.triton.quantize import quantize
from dist_infer.kernels.triton.quantized_experts import quantized_experts as by_triton


def quantized_experts(
    x: Tensor | Fp8Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: QuantizedTensor,
    w_down: QuantizedTensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.quantized_experts.quantized_experts`. Ids that are no experts held count as -1."""
    num_experts = w_down.shape[0] // x.shape[1]
    weight_format = format_of(w_down)
    if are_too_few(weight_format, expert_ids.numel(), num_experts):
        return by_triton(x, expert_ids, weights, w_gate_up, w_down, activation)
    forms = forms_for(weight_format, expert_ids.numel(), num_experts)
    orders = (
        expert_ids.numel() <= MAX_ORDERED and expert_ids.dtype == torch.int32 and all(form.is_short for form in forms)
    )
    first, second = (
        variant_for(form, weight_format, channels, kind, orders=orders)
        for form, channels, kind in zip(forms, (x.shape[1], w_down.shape[1]), (activation, None), strict=True)
    )
    expert_ids = expert_ids.contiguous()
    order = firsts = expert_ids.flatten()
    if not orders:
        order, firsts = align(expert_ids.int(), num_experts)
    rows = _operand(x, weight_format)
    top_k, is_given = expert_ids.shape[1], isinstance(x, Fp8Tensor)
    hidden = gate_up(rows, w_gate_up, num_experts, order, firsts, top_k, first, starts_early=not is_given)
    if first.is_fp8 and not first.quantizes:
        hidden = _operand(hidden, weight_format)
    outputs = down(hidden, w_down, num_experts, order, firsts, second)
    return sum_of_pairs(outputs, expert_ids, weights.contiguous(), num_experts)


def variant_for(
    form: Form, weight_format: WeightFormat, channels: int, activation: GatedActivation | None, *, orders: bool
) -> Variant:
    """Of a product over so many channels."""
    is_even = not channels % (2 * DEPTH)
    return Variant(
        weight_format=weight_format,
        activation=activation,
        scale_stages=2 if is_even and weight_format is not WeightFormat.FP8_BLOCK else 1,
        orders=orders,
        **form._asdict(),
    )


def _operand(rows: Tensor | Fp8Tensor, weight_format: WeightFormat) -> Tensor | Fp8Tensor:
    """What the products take."""
    if isinstance(rows, Fp8Tensor):
        return rows
    if weight_format is not WeightFormat.FP8_BLOCK:
        return in_places(rows, weight_format)
    carrier = Fp8Tensor.empty(rows.shape[0], rows.shape[1], Fp8Scaling.BLOCKS_1X128, device=rows.device)
    quantize(rows.contiguous(), carrier)
    return carrier
