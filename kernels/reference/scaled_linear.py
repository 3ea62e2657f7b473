"""Products with quantised weights in plain torch; the contract stands in kernels/scaled_linear.py."""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, QuantizedTensor
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.reference.quantize import dequantize


def scaled_linear(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `dist_infer.kernels.scaled_linear.scaled_linear`."""
    if isinstance(weight, PreparedWeight):
        raise TypeError("the reference takes a weight that no library has prepared")
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    values = dequantize(x, wide) if isinstance(x, Fp8Tensor) else x.to(wide)
    product = values @ dequantize(weight, wide).t()
    return (product if bias is None else product.add_(bias)).to(out_dtype)


def scaled_mm(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The FP8 product of cuBLAS; partial sums are kept in float32, which `use_fast_accum` would not do."""
    if not isinstance(x, Fp8Tensor) or not isinstance(weight, Fp8Tensor):
        raise TypeError(f"scaled_mm multiplies FP8 by FP8, not {type(x).__name__} by {type(weight).__name__}")
    if x.shape[0] == 0:
        return torch.empty(0, weight.shape[0], dtype=out_dtype, device=x.data.device)
    by_tensor = x.scaling is Fp8Scaling.TENSOR
    scales = (x.scales.view(()), weight.scales.view(())) if by_tensor else (x.scales, weight.scales.t())
    return torch._scaled_mm(x.data, weight.data.t(), *scales, bias, out_dtype=out_dtype, use_fast_accum=False)
