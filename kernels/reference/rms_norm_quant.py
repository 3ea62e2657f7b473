"""RMSNorm and quantisation in plain torch; the contract stands in kernels/rms_norm_quant.py."""

from torch import Tensor

from dist_infer.kernels.carriers import QuantizedTensor
from dist_infer.kernels.reference.quantize import quantize
from dist_infer.kernels.reference.rms_norm import rms_norm


def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, out: QuantizedTensor, with_norm: bool
) -> tuple[Tensor | None, Tensor]:
    """See `dist_infer.kernels.rms_norm_quant.rms_norm_quant`."""
    normed, total = rms_norm(x, weight, eps, residual)
    quantize(normed, out)
    return (normed if with_norm else None), total
