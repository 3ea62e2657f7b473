"""Activations and weights in narrow formats with scales, and back. M rows, K columns.

The formats are emulated bit by bit where the device has no instruction for them, so a tensor has the same bytes on
every device. One exception: NVFP4 multiplies by rcp.approx.ftz of computed values, which on a GPU is not always the
nearest reciprocal.
"""

from collections.abc import Callable
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.quantize import dequantize as reference_dequantize
from dist_infer.kernels.reference.quantize import quantize as reference_quantize

QuantizeFunction: TypeAlias = Callable[[Tensor, QuantizedTensor], None]

LIBRARIES: tuple[Library[QuantizeFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.quantize", "quantize"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_quantize, graph_safe=True),
)

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class QuantFormat(Enum):
    """A number format together with the layout of its scales."""

    FP8 = "fp8"  # one given scale
    FP8_ROWS = "fp8_rows"  # a scale for each row
    FP8_BLOCK128 = "fp8_block128"  # a scale for each 128 elements of a row
    NVFP4 = "nvfp4"  # swizzled scales
    NVFP4_LINEAR = "nvfp4_linear"
    MXFP8 = "mxfp8"  # swizzled scales
    MXFP8_LINEAR = "mxfp8_linear"

    def empty(self, rows: int, width: int, *, device: torch.device, scale: Tensor | None = None) -> QuantizedTensor:
        """For a kernel to fill. `scale` is the scale of FP8 and the global scale of NVFP4.

        Errors: ValueError for a width that the format can't hold, for a missing scale and for one without use.
        """
        if self is QuantFormat.FP8:
            return Fp8Tensor.empty(rows, width, Fp8Scaling.TENSOR, device=device, scale=scale)
        layout = ScaleLayout.LINEAR if self.value.endswith("_linear") else ScaleLayout.SWIZZLED_128X4
        if self in (QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR):
            return Nvfp4Tensor.empty(rows, width, layout, device=device, global_scale=scale)
        if scale is not None:
            raise ValueError(f"{self.value} finds its scales: it takes none")
        if self in (QuantFormat.FP8_ROWS, QuantFormat.FP8_BLOCK128):
            scaling = Fp8Scaling.ROWS if self is QuantFormat.FP8_ROWS else Fp8Scaling.BLOCKS_1X128
            return Fp8Tensor.empty(rows, width, scaling, device=device)
        return Mxfp8Tensor.empty(rows, width, layout, device=device)


def quantize(
    x: Tensor, quant_format: QuantFormat, scale: Tensor | None = None, *, library: Library[QuantizeFunction]
) -> QuantizedTensor:
    """x in another format.

    amax is the largest |x| of a block or row; NaN if one is NaN. All casts go to the nearest value, ties to even, and
    saturate; float32 in between.

    - FP8: e4m3(x * (1 / scale)).
    - FP8_ROWS, FP8_BLOCK128: scale = max(amax, 1e-10) * (1 / 448), e4m3(x * (1 / scale)).
    - MXFP8: scale = the power of two at or above amax * (1 / 448), found on the bits; e4m3(x / scale). The byte of NaN,
      255, is never given; a block of zeros has byte 0. Byte 0 on other blocks is 2^-127, whose reciprocal the hardware
      takes for infinite: they saturate, and zeros in them become NaN.
    - NVFP4: scale = e4m3(G * (amax * rcp(6))), e2m1(x * rcp(scale * rcp(G))), zeros where scale is 0. `scale` is
      G = 448 * 6 / amax of the tensor, below 2^126; without it G = 1.

    NaN and infinity: FP8 keeps NaN. A row or block of the other FP8 formats that holds one of them is read back with
    NaN in it, an NVFP4 block with NaN as NaN only; infinity saturates in FP8 and NVFP4.

    Shapes: x [M, K], contiguous, bfloat16, float16 or float32; scale 1 element, float32.
    Errors: ValueError for an input that isn't so, and as `QuantFormat.empty` says.
    Source: OCP Microscaling Formats (MX) 1.0; TensorRT-LLM's quantisation kernels.
    """
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES or not x.is_contiguous():
        layout = "" if x.is_contiguous() else ", not contiguous"
        raise ValueError(f"quantize: x {x.dtype} {list(x.shape)}{layout} is no contiguous float matrix")
    out = quant_format.empty(x.shape[0], x.shape[1], device=x.device, scale=scale)
    library.function(x, out)
    return out


def dequantize(x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """The values that x stands for, computed in float32 and rounded once.

    Shapes: -> [M, K].
    """
    return reference_dequantize(x, dtype)
