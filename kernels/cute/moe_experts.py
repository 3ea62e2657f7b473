"""The experts that a rank holds, with the grouped products of CuTe DSL; the contract stands in kernels/moe_experts.py.

Few pairs are put in the order of their experts by the products themselves, many by launches of their own. The kernels
of kernels/triton add up rows, and compute the products of so few pairs that each is by itself.
"""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute.grouped_gemm import down, gate_up
from dist_infer.kernels.cute.grouped_gemm_parts import Variant
from dist_infer.kernels.cute.moe_align import align
from dist_infer.kernels.cute.moe_forms import form_for
from dist_infer.kernels.cute.moe_order import MAX_ORDERED
from dist_infer.kernels.triton.moe_experts import by_pair, sum_of_pairs
from dist_infer.kernels.triton.moe_experts import expert_outputs as outputs_by_triton
from dist_infer.kernels.triton.moe_experts import moe_experts as by_triton


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
    *,
    form: int | None = None,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.moe_experts`. Ids that are no experts held count as -1.

    `form` is a place in the list of moe_forms; None: as measured on an H200, few pairs one by one.
    """
    if _by_triton(expert_ids, w_down, form):
        return by_triton(x, expert_ids, weights, w_gate_up, w_down, activation)
    outputs = expert_outputs(x, expert_ids, w_gate_up, w_down, activation, form=form)
    return sum_of_pairs(outputs, expert_ids.contiguous(), weights.contiguous(), len(w_down))


def expert_outputs(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
    *,
    form: int | None = None,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.expert_outputs`. Ids that are no experts held count as -1; `form` as above.

    Shapes: -> [R * K, D].
    """
    if _by_triton(expert_ids, w_down, form):
        return outputs_by_triton(x, expert_ids, w_gate_up, w_down, activation)
    num_experts, width, inner = w_down.shape
    own = form_for(expert_ids.numel(), num_experts, width, inner, form)
    orders = expert_ids.numel() <= MAX_ORDERED and own.is_short and expert_ids.dtype == torch.int32
    first, second = (
        Variant(activation=kind, dtype=x.dtype, orders=orders, **own._asdict()) for kind in (activation, None)
    )
    order = firsts = expert_ids.flatten()
    if not orders:
        order, firsts = align(expert_ids.int().contiguous(), num_experts)
    hidden = gate_up(x.contiguous(), w_gate_up.contiguous(), order, firsts, expert_ids.shape[1], first)
    return down(hidden, w_down.contiguous(), order, firsts, second)


def _by_triton(expert_ids: Tensor, w_down: Tensor, form: int | None) -> bool:
    if 0 in (*w_down.shape, expert_ids.numel()):
        return True
    return form is None and by_pair(expert_ids.numel(), len(w_down))
