"""The gated activation in Triton; the contract stands in kernels/silu_mul.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.triton.dependent_launch import overlaps

_BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x) in float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """What a GatedActivation of this value makes of float32 gates and ups."""
    if ACTIVATION == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(tl.abs(up) > 7.0, tl.where(up > 0, 7.0, -7.0), up)
        result = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        result = silu(gate) * up
    return result


@triton.jit
def _silu_mul(
    gate_up, out, row_stride, num_channels, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < num_channels
    gate = tl.load(gate_up + row * row_stride + channel, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + num_channels + channel, mask=inside).to(tl.float32)
    tl.store(out + row * num_channels + channel, gated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, activation: GatedActivation = GatedActivation.SILU) -> Tensor:
    """See `dist_infer.kernels.silu_mul.silu_mul`."""
    num_tokens, num_channels = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((num_tokens, num_channels), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(num_channels, _BLOCK))
        overlap = overlaps(gate_up)
        _silu_mul[grid](
            gate_up,
            out,
            gate_up.stride(0),
            num_channels,
            ACTIVATION=activation.value,
            BLOCK=_BLOCK,
            OVERLAP=overlap,
            num_warps=4,
            launch_pdl=overlap,
        )
    return out
