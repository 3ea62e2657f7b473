"""The experts that a rank holds, with the grouped products of CuTe DSL; the contract stands in kernels/moe_experts.py.

Pairs are put in the order of their experts and rows are added up by the launches of kernels/triton, and so are the
products of few pairs an expert.
"""

from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute.grouped_gemm import down, gate_up
from dist_infer.kernels.cute.grouped_gemm_parts import Variant
from dist_infer.kernels.triton.moe_align import align
from dist_infer.kernels.triton.moe_experts import expert_outputs as outputs_by_triton
from dist_infer.kernels.triton.moe_experts import moe_experts as by_triton
from dist_infer.kernels.triton.moe_experts import sum_of_pairs

_MIN_PAIRS = 32  # an expert, on average: below it the products of Triton are the faster ones
_BLOCK_LEN = 128  # of the table of blocks, which these products don't read
_SIZES = (16, 32, 48, 64, 80, 96, 104, 112, 120, 128, 136, 144)
_NUM_STAGES = 4


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.moe_experts`. Ids that are no experts held count as -1."""
    if _are_few(expert_ids, w_down):
        return by_triton(x, expert_ids, weights, w_gate_up, w_down, activation)
    outputs = expert_outputs(x, expert_ids, w_gate_up, w_down, activation)
    return sum_of_pairs(outputs, expert_ids.contiguous(), weights.contiguous(), len(w_down))


def expert_outputs(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """See `dist_infer.kernels.moe_experts.expert_outputs`. Ids that are no experts held count as -1.

    Shapes: -> [R * K, D].
    """
    if _are_few(expert_ids, w_down):
        return outputs_by_triton(x, expert_ids, w_gate_up, w_down, activation)
    expert_ids = expert_ids.contiguous()
    pairs = align(expert_ids, len(w_down), _BLOCK_LEN)
    first, second = (
        Variant(activation=kind, sizes=_SIZES, num_stages=_NUM_STAGES, dtype=x.dtype) for kind in (activation, None)
    )
    hidden = gate_up(x.contiguous(), w_gate_up.contiguous(), pairs.order, pairs.firsts, expert_ids.shape[1], first)
    return down(hidden, w_down.contiguous(), pairs.order, pairs.firsts, second)


def _are_few(expert_ids: Tensor, w_down: Tensor) -> bool:
    return expert_ids.numel() < _MIN_PAIRS * len(w_down) or 0 in w_down.shape
