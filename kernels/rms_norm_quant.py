"""Residual addition, RMSNorm and quantisation in one launch. T tokens, D hidden."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.carriers import QuantizedTensor
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.reference.rms_norm_quant import rms_norm_quant as reference_rms_norm_quant
from dist_infer.kernels.rms_norm import check_inputs

RmsNormQuantFunction: TypeAlias = Callable[
    [Tensor, Tensor, float, Tensor | None, QuantizedTensor, bool], tuple[Tensor | None, Tensor]
]

LIBRARIES: tuple[Library[RmsNormQuantFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.rms_norm_quant", "rms_norm_quant"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_rms_norm_quant, graph_safe=True),
)


def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    quant_format: QuantFormat,
    scale: Tensor | None = None,
    *,
    with_norm: bool,
    library: Library[RmsNormQuantFunction],
) -> tuple[Tensor | None, Tensor, QuantizedTensor]:
    """(norm_out, residual_out, norm_out in another format): `rms_norm`, then `quantize` of what it has rounded.

    norm_out is computed but not stored, and None, without `with_norm`. The bytes of all three are those of the two ops
    one after the other, by libraries of the same name.

    Shapes: x, residual, norm_out, residual_out [T, D]; weight [D]; scale 1 element.
    Errors: ValueError as in `rms_norm` and in `QuantFormat.empty`.
    """
    check_inputs(x, weight, residual)
    out = quant_format.empty(x.shape[0], x.shape[1], device=x.device, scale=scale)
    normed, total = library.function(x, weight, eps, residual, out, with_norm)
    return normed, total, out
