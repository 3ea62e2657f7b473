"""Weights, and inputs of FP8, in all formats of a quantised product, by the reference."""

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.reference.quantize import quantize
from dist_infer.kernels.scaled_linear import WeightFormat


def quantized(x: Tensor, weight_format: WeightFormat, *, is_input: bool = False) -> QuantizedTensor:
    """The matrix as a weight of this format, or as an input of one; scales that span a tensor come from its largest."""
    out: QuantizedTensor
    rows, width = x.shape
    if weight_format is WeightFormat.FP8:
        scale = (x.float().abs().max() / 448).view(1) if x.numel() else torch.ones(1, device=x.device)
        out = Fp8Tensor.empty(rows, width, Fp8Scaling.TENSOR, device=x.device, scale=scale)
    elif weight_format is WeightFormat.FP8_BLOCK:
        scaling = Fp8Scaling.BLOCKS_1X128 if is_input else Fp8Scaling.BLOCKS_128X128
        out = Fp8Tensor.empty(rows, width, scaling, device=x.device)
    elif weight_format is WeightFormat.MXFP8:
        out = Mxfp8Tensor.empty(rows, width, ScaleLayout.LINEAR, device=x.device)
    else:
        scale = (448 * 6 / x.float().abs().max()).view(1)
        out = Nvfp4Tensor.empty(rows, width, ScaleLayout.LINEAR, device=x.device, global_scale=scale)
    quantize(x, out)
    return out
