"""Rows with their channels where products with dequantised weights take them; see cute/quantized_decode."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

_CHANNELS = 1024  # of a program


def in_places(x: Tensor, weight_format: WeightFormat) -> Tensor:
    """The channels of every row, for MXFP8 or NVFP4 weights.

    With MXFP8 place 8 h + 2 q + i of every 16 holds channel 4 q + 2 i + h, with NVFP4 place 16 s + 8 h + 2 q + i of
    every 32 holds channel 8 q + 4 i + 2 s + h.

    Shapes: x [R, D], whose rows lie apart as they like, 32 divides D -> [R, D].
    """
    num_rows, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    channels = min(_CHANNELS, triton.next_power_of_2(width))
    _places_kernel[(num_rows, triton.cdiv(width, channels))](
        x, out, x.stride(0), WIDTH=width, FORMAT=weight_format.value, CHANNELS=channels, num_warps=4, **overlapping(x)
    )
    return out


@triton.jit
def _places_kernel(
    x, out, row_stride, WIDTH: tl.constexpr, FORMAT: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < WIDTH
    values = tl.load(x + row * row_stride + channel, mask=inside, other=0.0)
    if FORMAT == "nvfp4":  # q i s h -> s h q i
        fields = tl.permute(tl.reshape(values, (CHANNELS // 32, 4, 2, 2, 2)), (0, 3, 4, 1, 2))
    else:  # q i h -> h q i
        fields = tl.permute(tl.reshape(values, (CHANNELS // 16, 4, 2, 2)), (0, 3, 1, 2))
    tl.store(out + row * WIDTH + channel, tl.reshape(fields, (CHANNELS,)), mask=inside)
