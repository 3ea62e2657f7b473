"""Packed weights: every code and scale in its place."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import Mxfp8Tensor, Nvfp4Tensor, ScaleLayout
from dist_infer.kernels.packed_weight import WORDS, PackedWeight, pack_weight
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.reference.quantize import ue8m0_values

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def weight_of(rows: int, width: int, *, is_nvfp4: bool) -> Nvfp4Tensor | Mxfp8Tensor:
    if is_nvfp4:
        data, scales = random_bytes(rows, width // 2), random_bytes(rows * width // 16, high=0x7F)
        return Nvfp4Tensor(data=data, scales=scales, layout=ScaleLayout.LINEAR, shape=(rows, width))
    codes = random_bytes(rows, width, high=0x7F) | random_bytes(width, high=2).mul(128)
    scales = random_bytes(rows * width // 32, low=100, high=150)
    return Mxfp8Tensor(
        data=codes.view(torch.float8_e4m3fn), scales=scales, layout=ScaleLayout.LINEAR, shape=(rows, width)
    )


def unpacked(packed: PackedWeight) -> Tensor:
    """Values by the description of a tile: of each thread 4 g + c, words of its two rows."""
    num_tiles = -(-packed.shape[0] // 16) * packed.tiles_across
    data = packed.data[:num_tiles].view(torch.uint8).view(-1, packed.tiles_across, 2, 8, 4, 16)
    scales = packed.scales[:num_tiles].view(torch.uint8).view(-1, packed.tiles_across, 8, 2, packed.scale_words // 4)
    scales = scales.permute(0, 3, 2, 1, 4)  # group, half, g, tile, block
    if packed.is_nvfp4:
        nibbles = torch.stack([data & 15, data >> 4], -1).view(*data.shape[:-1], 4, 8).long()
        codes = nibbles[..., [0, 4, 1, 5, 2, 6, 3, 7]]  # group, tile, half, g, c, 32 columns, code
        values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
        factors = scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    else:
        codes = data.view(*data.shape[:-1], 2, 2, 4)[..., [0, 2, 1, 3]].reshape(*data.shape[:-1], 2, 8)
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
        factors = ue8m0_values(scales).repeat_interleave(32, -1)
    rows = packed.shape[0] + -packed.shape[0] % 16
    ordered = values.permute(0, 2, 3, 1, 5, 4, 6).reshape(rows, -1)
    return ordered * factors.reshape(rows, -1)


@pytest.mark.parametrize("is_nvfp4", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(16, 128), (48, 384), (24, 96), (5, 224)])
def test_every_element_is_found_again(rows: int, width: int, is_nvfp4: bool) -> None:
    weight = weight_of(rows, width, is_nvfp4=is_nvfp4)
    packed = pack_weight(weight)
    values = unpacked(packed)
    assert torch.equal(values[:rows, :width], dequantize(weight, torch.float32))
    assert not values[rows:].any() and not values[:, width:].any()
    behind = packed.tiles_across
    assert packed.data.shape == (-(-rows // 16) * packed.tiles_across + behind, WORDS)
    assert not packed.data[-behind:].any() and not packed.scales[-behind:].any()
    assert packed.shape == (rows, width)


def test_large_weights_are_packed_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(80, 128, is_nvfp4=True)
    whole = pack_weight(weight)
    monkeypatch.setattr("dist_infer.kernels.packed_weight._CHUNK", 32 * 128)
    parts = pack_weight(weight)
    assert torch.equal(parts.data, whole.data) and torch.equal(parts.scales, whole.scales)


def test_what_has_no_number_is_refused() -> None:
    nvfp4, mxfp8 = weight_of(16, 128, is_nvfp4=True), weight_of(16, 128, is_nvfp4=False)
    swizzled = Nvfp4Tensor.empty(32, 128, ScaleLayout.SWIZZLED_128X4, device=torch.device("cpu"))
    nvfp4.scales[5] = 0x7F
    mxfp8.data.view(torch.uint8)[3, 4] = 0xFF
    with pytest.raises(ValueError, match="holds NaN"):
        pack_weight(nvfp4)
    with pytest.raises(ValueError, match="holds NaN"):
        pack_weight(mxfp8)
    with pytest.raises(ValueError, match="are linear, not swizzled"):
        pack_weight(swizzled)
