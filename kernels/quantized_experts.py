"""The experts that a rank holds, with quantised weights, on the tokens that are routed to them.

R rows, K experts a row, E experts held, D model, I intermediate channels held. The weights of all experts are one
matrix of E times as many rows.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation, QuantizedTensor
from dist_infer.kernels.dispatch import Library, Sizes, Target, deferred, on_triton
from dist_infer.kernels.moe_experts import misfit_of_cute
from dist_infer.kernels.reference.quantized_experts import quantized_experts as reference_quantized_experts
from dist_infer.kernels.scaled_linear import WeightFormat, check_operands

QuantizedExpertsFunction: TypeAlias = Callable[
    [Tensor | Fp8Tensor, Tensor, Tensor, QuantizedTensor, QuantizedTensor, GatedActivation], Tensor
]

_CUTE_CHANNELS = 128


def _on_bf16_triton(target: Target) -> str | None:
    if target.dtype != torch.bfloat16:
        return f"gives bfloat16, not {target.dtype}"
    return on_triton(target)


def _on_sizes_of_cute(target: Target) -> str | None:
    return _on_bf16_triton(target) or misfit_of_cute(target, _CUTE_CHANNELS)


_REFERENCE: Library[QuantizedExpertsFunction] = Library(name="torch", function=reference_quantized_experts)
_TRITON: Library[QuantizedExpertsFunction] = Library(
    name="triton",
    function=deferred("dist_infer.kernels.triton.quantized_experts", "quantized_experts"),
    is_available=_on_bf16_triton,
    graph_safe=True,
)
_CUTE: Library[QuantizedExpertsFunction] = Library(
    name="cute",
    function=deferred("dist_infer.kernels.cute.quantized_experts", "quantized_experts"),
    is_available=_on_sizes_of_cute,
    graph_safe=True,
)

LIBRARIES: Mapping[WeightFormat, tuple[Library[QuantizedExpertsFunction], ...]] = MappingProxyType(
    {
        WeightFormat.FP8_BLOCK: (_TRITON, _CUTE, _REFERENCE),
        WeightFormat.MXFP8: (_TRITON, _CUTE, _REFERENCE),
        WeightFormat.NVFP4: (_TRITON, _CUTE, _REFERENCE),
    }
)


def misfit(weight_format: WeightFormat, width: int, inner: int) -> str | None:
    """Why experts with D = `width` and I = `inner` can't be held in this format; None where they can."""
    if weight_format not in LIBRARIES:
        return f"experts aren't held in {weight_format.value}: use {', '.join(known.value for known in LIBRARIES)}"
    block = {WeightFormat.FP8_BLOCK: 128, WeightFormat.MXFP8: 32, WeightFormat.NVFP4: 16}[weight_format]
    odd = [size for size in (width, inner) if size % block or not size]
    return f"{block} doesn't divide its {odd[0]} channels" if odd else None


def geometry_of(weight_format: WeightFormat, *, experts: int, width: int, intermediate: int) -> Sizes:
    """What the target of a layer says of it, by whose names measurements go: the format is one of them."""
    return {"experts": experts, "width": width, "intermediate": intermediate, weight_format.value: 1}


def quantized_experts(
    x: Tensor | Fp8Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: QuantizedTensor,
    w_down: QuantizedTensor,
    *,
    activation: GatedActivation = GatedActivation.SILU,
    library: Library[QuantizedExpertsFunction],
) -> Tensor:
    """As `dist_infer.kernels.moe_experts.moe_experts`, each product as `kernels.scaled_linear.scaled_linear` has it.

    With FP8 weights of 128 x 128 the rows are quantised 1 x 128, unless they come so, and likewise what
    silu(gate) * up gives once it is rounded to the dtype of x. With MXFP8 and NVFP4 weights neither is.

    Shapes: x [R, D], expert_ids [R, K] int32 or int64, weights [R, K] float32 or float64, w_gate_up [E * 2 * I, D],
        each expert's gates first, w_down [E * D, I] -> [R, D] of the dtype of x, bfloat16 where x comes quantised. 128
        divides D and I with FP8 weights.
    Errors: ValueError for shapes, dtypes and scales that don't fit.
    """
    num_rows, width = x.shape if len(x.shape) == 2 else (-1, -1)
    if num_rows < 0 or expert_ids.dim() != 2 or len(expert_ids) != num_rows or weights.shape != expert_ids.shape:
        raise ValueError(
            f"quantized_experts: x {list(x.shape)}, ids {list(expert_ids.shape)} and weights {list(weights.shape)} are"
            " not [R, D], [R, K] and [R, K]"
        )
    (gate_up_rows, gate_up_width), (down_rows, inner) = w_gate_up.shape, w_down.shape
    if gate_up_width != width or down_rows % width or gate_up_rows != down_rows // width * 2 * inner:
        raise ValueError(
            f"quantized_experts: weights {[gate_up_rows, gate_up_width]} and {[down_rows, inner]} are not"
            f" [E 2 I, {width}] and [E {width}, I]"
        )
    if type(w_gate_up) is not type(w_down):
        raise ValueError(f"quantized_experts: {type(w_gate_up).__name__} meets {type(w_down).__name__}")
    for weight in (w_gate_up, w_down):
        if isinstance(weight, Fp8Tensor) and (weight.scaling is not Fp8Scaling.BLOCKS_128X128 or inner % 128):
            raise ValueError(
                f"quantized_experts: FP8 weights have scales of 128 x 128 and an inner width that 128 divides, not"
                f" {weight.scaling.value} and {inner}"
            )
    if isinstance(x, Fp8Tensor):
        check_operands(x, w_gate_up, torch.bfloat16)
    elif not isinstance(w_gate_up, Fp8Tensor):
        check_operands(x, w_gate_up, x.dtype)
    if expert_ids.dtype not in (torch.int32, torch.int64) or weights.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"quantized_experts: ids {expert_ids.dtype} or weights {weights.dtype} are of another kind")
    return library.function(x, expert_ids, weights, w_gate_up, w_down, activation)
