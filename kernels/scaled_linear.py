"""A matrix product with a quantised weight. T tokens, K inputs, N outputs."""

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Library, Target, deferred, on_cute, on_triton
from dist_infer.kernels.packed_weight import PackedWeight, pack_weight
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.reference.scaled_linear import scaled_linear as reference_scaled_linear
from dist_infer.kernels.reference.scaled_linear import scaled_mm
from dist_infer.kernels.staged_weight import StagedWeight, stage_weight

ScaledLinearFunction: TypeAlias = Callable[
    [Tensor | Fp8Tensor, QuantizedTensor | PreparedWeight, Tensor | None, torch.dtype], Tensor
]


class WeightFormat(Enum):
    """How a weight is quantised, and what its input must be."""

    FP8 = "fp8"  # a scale a row, or one for all; the input the same
    FP8_BLOCK = "fp8-block"  # a scale for 128 x 128; the input has one for 1 x 128
    MXFP8 = "mxfp8"  # linear scales; the input is not quantised
    NVFP4 = "nvfp4"  # the same


def _on_scaled_mm(target: Target) -> str | None:
    if target.device.type != "cuda":
        return f"needs a GPU, not {target.device.type}"
    if target.dtype != torch.bfloat16:
        return f"gives bfloat16, not {target.dtype}"
    sizes = [target.geometry[name] for name in ("inputs", "outputs") if name in target.geometry]
    odd = [size for size in sizes if size % 16 or not size]
    return f"needs sizes that 16 divides, not {odd[0]}" if odd else None


def _on_bf16_triton(target: Target) -> str | None:
    if target.dtype != torch.bfloat16:
        return f"gives bfloat16, not {target.dtype}"
    return on_triton(target)


def _on_hopper_triton(target: Target) -> str | None:
    reason = _on_bf16_triton(target)
    if reason is None and torch.cuda.get_device_capability(target.device) < (9, 0):
        reason = "needs instructions of compute capability 9.0"
    return reason


def _on_bf16_cute(target: Target) -> str | None:
    if target.dtype != torch.bfloat16:
        return f"gives bfloat16, not {target.dtype}"
    return on_cute(target)


_REFERENCE: Library[ScaledLinearFunction] = Library(name="torch", function=reference_scaled_linear, graph_safe=True)
_STAGED: Library[ScaledLinearFunction] = Library(
    name="cute",
    function=deferred("dist_infer.kernels.cute.staged_linear", "staged_linear"),
    is_available=_on_bf16_cute,
    graph_safe=True,
    prepare=stage_weight,
)
_PACKED: Library[ScaledLinearFunction] = Library(
    name="triton",
    function=deferred("dist_infer.kernels.triton.packed_linear", "packed_linear"),
    is_available=_on_hopper_triton,
    graph_safe=True,
    prepare=pack_weight,
)
_BLOCKS: Library[ScaledLinearFunction] = Library(
    name="triton",
    function=deferred("dist_infer.kernels.triton.scaled_linear", "block_linear"),
    is_available=_on_bf16_triton,
    graph_safe=True,
)
LIBRARIES: Mapping[WeightFormat, tuple[Library[ScaledLinearFunction], ...]] = MappingProxyType(
    {
        WeightFormat.FP8: (
            Library(name="scaled_mm", function=scaled_mm, is_available=_on_scaled_mm, graph_safe=True),
            _REFERENCE,
        ),
        WeightFormat.FP8_BLOCK: (_BLOCKS, _REFERENCE),
        WeightFormat.MXFP8: (_STAGED, _PACKED, _REFERENCE),
        WeightFormat.NVFP4: (_STAGED, _PACKED, _REFERENCE),
    }
)


def scaled_linear(
    x: Tensor | Fp8Tensor,
    weight: QuantizedTensor | PreparedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    library: Library[ScaledLinearFunction],
) -> Tensor:
    """x W^T + bias in `out_dtype`, accumulated in float32 and rounded once.

    - FP8, a scale a tensor or a row each: of two tensors' values, times both scales.
    - FP8, input 1 x 128, weight 128 x 128: sums over 128 inputs, each times its two scales.
    - MXFP8 and NVFP4 weight, x of `out_dtype`: its dequantised values, which bfloat16 holds exactly; a global scale
      divides the sum.

    A library with `prepare` takes weights that went through it, and no others.

    Shapes: x [T, K], weight [N, K], bias [N] of `out_dtype` -> [T, N], contiguous.
    Errors: ValueError for shapes, dtypes and scales that don't fit.
    """
    check_operands(x, weight, out_dtype)
    if bias is not None and (tuple(bias.shape) != weight.shape[:1] or bias.dtype != out_dtype):
        raise ValueError(
            f"scaled_linear: bias {bias.dtype} {list(bias.shape)} does not fit weight {list(weight.shape)}"
        )
    return library.function(x, weight, bias, out_dtype)


def check_operands(x: Tensor | Fp8Tensor, weight: QuantizedTensor | PreparedWeight, out_dtype: torch.dtype) -> None:
    """Errors: ValueError when this input can't be multiplied by this weight."""
    if len(x.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"scaled_linear: x {list(x.shape)} does not fit weight {list(weight.shape)}")
    if isinstance(weight, Fp8Tensor):
        wanted = {
            Fp8Scaling.TENSOR: Fp8Scaling.TENSOR,
            Fp8Scaling.ROWS: Fp8Scaling.ROWS,
            Fp8Scaling.BLOCKS_128X128: Fp8Scaling.BLOCKS_1X128,
            Fp8Scaling.BLOCKS_1X128: None,
        }[weight.scaling]
        found = x.scaling if isinstance(x, Fp8Tensor) else None
        if wanted is None or found is not wanted:
            given = found.value if found else "none"
            raise ValueError(f"scaled_linear: FP8 scales of x and weight don't fit: {given}, {weight.scaling.value}")
        return
    if isinstance(x, Fp8Tensor) or x.dtype != out_dtype:
        given = "FP8" if isinstance(x, Fp8Tensor) else str(x.dtype)
        raise ValueError(f"scaled_linear: {type(weight).__name__} as weight takes an x of {out_dtype}, not {given}")
    if not isinstance(weight, PackedWeight | StagedWeight) and weight.layout is not ScaleLayout.LINEAR:
        raise ValueError(f"scaled_linear: the scales of a weight are linear, not {weight.layout.value}")
