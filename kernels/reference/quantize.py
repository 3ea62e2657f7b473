"""Quantisation in plain torch, and back; the contract stands in kernels/quantize.py. M rows, K columns."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout

Reciprocal: TypeAlias = Callable[[Tensor], Tensor]

E4M3_MAX = 448.0
FP8_BLOCK = 128
SMALLEST_AMAX = 1e-10  # of an FP8 block: below it the reciprocal of the scale would leave float32
_TINY = torch.finfo(torch.float32).tiny


def nearest_reciprocal(x: Tensor) -> Tensor:
    """1 / x rounded to nearest, denormals taken and given as zeros of their sign: rcp.approx.ftz without its error."""

    def flushed(y: Tensor) -> Tensor:
        return torch.where(y.abs() < _TINY, torch.zeros_like(y).copysign(y), y)

    return flushed(flushed(x).reciprocal())


def quantize(x: Tensor, out: QuantizedTensor, rcp: Reciprocal = nearest_reciprocal) -> None:
    """See `dist_infer.kernels.quantize.quantize`. `rcp` is the hardware's instruction, or stands for it."""
    if isinstance(out, Nvfp4Tensor):
        codes, scales = nvfp4_codes(x, out.global_scale, rcp)
        out.data.copy_(codes[:, 0::2] | codes[:, 1::2] << 4)
        out.scales.copy_(laid_out(scales, out.layout))
    elif isinstance(out, Mxfp8Tensor):
        data, scales = mxfp8_values(x)
        out.data.copy_(data)
        out.scales.copy_(laid_out(scales, out.layout))
    elif out.scaling is Fp8Scaling.TENSOR:
        out.data.copy_(to_e4m3(x.float() * (1.0 / out.scales)))
    else:
        tile_rows, tile_width = _tile(out)
        data, fp8_scales = fp8_blocks(x, tile_rows, tile_width)
        out.data.copy_(data)
        out.scales.copy_(fp8_scales)


def dequantize(x: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """See `dist_infer.kernels.quantize.dequantize`."""
    rows, width = x.shape
    if isinstance(x, Fp8Tensor):
        scales = x.scales
        if x.scaling is not Fp8Scaling.TENSOR:
            tile_rows, tile_width = _tile(x)
            scales = scales.repeat_interleave(tile_rows, 0)[:rows].repeat_interleave(tile_width, 1)
        return (x.data.float() * scales).to(dtype)
    scale_bytes = row_major(x.scales, x.layout, rows, width // x.BLOCK)
    if isinstance(x, Mxfp8Tensor):
        return (blocks_of(x.data.float(), x.BLOCK) * ue8m0_values(scale_bytes)[..., None]).to(dtype).view(rows, width)
    codes = torch.stack([x.data & 15, x.data >> 4], -1).view(rows, width)
    values = blocks_of(e2m1_values(codes), x.BLOCK) * scale_bytes.view(torch.float8_e4m3fn).float()[..., None]
    if x.global_scale is not None:
        values = values / x.global_scale
    return values.to(dtype).view(rows, width)


def nvfp4_codes(x: Tensor, global_scale: Tensor | None, rcp: Reciprocal) -> tuple[Tensor, Tensor]:
    """E2M1 codes [M, K] and E4M3 scale bytes [M, K / 16]."""
    one = torch.ones(1, device=x.device)
    scale = one if global_scale is None else global_scale.view(1)
    blocks = blocks_of(x.float(), Nvfp4Tensor.BLOCK)
    stored = to_e4m3(scale * (blocks.abs().amax(-1) * rcp(6 * one)))
    wide = stored.float()
    multiplier = torch.where(wide == 0, 0.0, rcp(wide * rcp(scale)))
    return e2m1_codes(blocks, multiplier[..., None]).view(x.shape), stored.view(torch.uint8)


def mxfp8_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 values [M, K] and UE8M0 scale bytes [M, K / 32]."""
    blocks = blocks_of(x.float(), Mxfp8Tensor.BLOCK)
    amax = blocks.abs().amax(-1)
    scales = ue8m0_above(amax * torch.tensor(1 / E4M3_MAX))
    # 1 / 2^(b - 127) as rcp.approx.ftz gives it: infinity for the denormal 2^-127, zero where the result is that
    exponent = torch.where(scales == 0, 255, 254 - scales)
    multiplier = torch.where(amax == 0, 0.0, (exponent << 23).view(torch.float32))
    return to_e4m3(blocks * multiplier[..., None]).view(x.shape), scales.to(torch.uint8)


def _tile(x: Fp8Tensor) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if x.scaling is Fp8Scaling.ROWS:
        return 1, x.shape[1]
    return (1 if x.scaling is Fp8Scaling.BLOCKS_1X128 else FP8_BLOCK), FP8_BLOCK


def fp8_blocks(x: Tensor, tile_rows: int, tile_width: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """E4M3 values [M, K] and float32 scales [ceil(M / tile_rows), K / tile_width] of tiles."""
    rows, width = x.shape
    tiles_down = -(-rows // tile_rows)
    padded = torch.zeros(tiles_down * tile_rows, width, device=x.device)
    padded[:rows] = x
    tiles = padded.view(tiles_down, tile_rows, width // tile_width, tile_width)
    scales = tiles.abs().amax((1, 3)).clamp(min=SMALLEST_AMAX) * torch.tensor(1 / E4M3_MAX)
    data = to_e4m3(tiles * (1.0 / scales)[:, None, :, None])
    return data.view(padded.shape)[:rows], scales


def blocks_of(x: Tensor, block: int) -> Tensor:
    """[M, K] as [M, K / block, block]."""
    return x.view(x.shape[0], x.shape[1] // block, block)


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value, ties to even, at most 448; NaN is byte 0x7F, as the hardware's cast has it."""
    nearest = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, nearest).to(torch.uint8).view(torch.float8_e4m3fn)


def e2m1_codes(x: Tensor, multiplier: Tensor) -> Tensor:
    """Code of the E2M1 value nearest to x * multiplier, ties to the even code, at most 6, which a size of NaN is too.

    The sign is that of x: -0 keeps it.
    """
    size = (x * multiplier).abs().nan_to_num(nan=6.0).clamp(max=6.0)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    # [0, 2): codes 0 to 4 are halves; [2, 4): 4 to 6 are ones; [4, 6]: 6 and 7 are twos
    code = (size / step).round() + torch.where(size < 2, 0.0, torch.where(size < 4, 2.0, 4.0))
    return code.to(torch.uint8) | torch.where(x.signbit(), 8, 0).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """What codes stand for, in float32."""
    size = (codes & 7).float()
    size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, 2 * size - 8))
    return torch.where(codes >= 8, -size, size)


def ue8m0_above(x: Tensor) -> Tensor:
    """Exponent byte of the smallest power of two that isn't below x >= 0, at most 254; as int32."""
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)  # byte 0 is 2^-127, half the smallest normal
    return (exponent + up).clamp(max=254).to(torch.int32)


def ue8m0_values(scales: Tensor) -> Tensor:
    """2^(b - 127)."""
    bits = scales.to(torch.int32)
    return torch.where(bits == 0, 0x400000, bits << 23).view(torch.float32)


def laid_out(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """Scale bytes [M, blocks] as a buffer; zeros in rows that don't exist."""
    if layout is ScaleLayout.LINEAR:
        return scales.reshape(-1)
    rows, blocks = scales.shape
    tiles_down = -(-rows // 128)
    padded = scales.new_zeros(tiles_down * 128, blocks)
    padded[:rows] = scales
    return padded.view(tiles_down, 4, 32, blocks // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def row_major(buffer: Tensor, layout: ScaleLayout, rows: int, blocks: int) -> Tensor:
    """The scale bytes [M, blocks] of a buffer."""
    if layout is ScaleLayout.LINEAR:
        return buffer.view(rows, blocks)
    tiles_down = -(-rows // 128)
    tiles = buffer.view(tiles_down, blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tiles_down * 128, blocks)[:rows]
