"""Staged weights: what a kernel's masks, rotations and factors make of them, against the values they were made of."""

import re

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import Mxfp8Tensor, Nvfp4Tensor, ScaleLayout
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.staged_weight import COLUMNS, NVFP4_UNIT, ROWS, TILE_BYTES, StagedWeight, stage_weight

CPU = torch.device("cpu")


def random_weight(is_nvfp4: bool, rows: int, width: int, *, highest: int) -> Nvfp4Tensor | Mxfp8Tensor:
    """Any codes but NaN, scales up to `highest` and zeros among them."""
    generator = torch.Generator().manual_seed(rows + width)
    weight: Nvfp4Tensor | Mxfp8Tensor
    if is_nvfp4:
        scale = torch.full((1,), 4.0)
        weight = Nvfp4Tensor.empty(rows, width, ScaleLayout.LINEAR, device=CPU, global_scale=scale)
    else:
        weight = Mxfp8Tensor.empty(rows, width, ScaleLayout.LINEAR, device=CPU)
    data = weight.data.view(torch.uint8)
    data.copy_(torch.randint(0, 256, data.shape, generator=generator))
    if not is_nvfp4:
        data[data & 0x7F == 0x7F] = 0x80
    weight.scales.copy_(torch.randint(0, highest + 1, weight.scales.shape, generator=generator))
    weight.scales[::5] = torch.randint(0, 12, weight.scales[::5].shape, generator=generator).to(torch.uint8)
    return weight


def halves(words: Tensor) -> Tensor:
    """The lower and the upper 16 bits of words, as bfloat16 in float64.

    Shapes: int64 [...] -> [..., 2].
    """
    parts = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)
    return torch.where(parts >= 2**15, parts - 2**16, parts).to(torch.int16).view(torch.bfloat16).double()


def values_of(weight: StagedWeight) -> Tensor:
    """What a kernel reads, whole stages."""
    columns = COLUMNS[weight.is_nvfp4]
    tiles = weight.data.view(-1, weight.num_stages, 4, 2, TILE_BYTES[weight.is_nvfp4] // 4)
    words = tiles[..., :1024].long().view(*tiles.shape[:4], 4, 2, 8, 4, 4) & 0xFFFFFFFF  # warp, half, g, c, word
    if weight.is_nvfp4:
        sixth, fourth = (words >> 6 | words << 26, words >> 4 | words << 28)
        third = fourth & 0x80C080C0 | words << 4 & 0x01000100
        pairs = torch.stack([words & 0x81C081C0, sixth & 0x81C081C0, words << 6 & 0x81C081C0, third], -1)
    else:
        second = (words & 0x000F000F) * 0x1010 & 0x80708070 | words >> 4 & 0x07800780
        pairs = torch.stack([words & 0x87F087F0, second], -1)
    codes = halves(pairs)  # ... warp, half, g, c, word, pair, element
    order = (0, 2, 4, 5, 6, 1, 3, 8, 9, 7, 10)  # group, part, warp, half, g | stage, tile, word, pair, c, element
    matrix = codes.permute(order).reshape(-1, weight.num_stages * columns)
    scales = (
        tiles[..., 1024:].contiguous().view(torch.uint8).view(*tiles.shape[:4], 4, 8, -1, 2)
    )  # warp, g, block, half
    by_row = scales.permute(0, 2, 4, 7, 5, 1, 3, 6).reshape(len(matrix), -1).long()
    if weight.is_nvfp4:
        factors = halves(by_row * 16 + (235 << 7))[..., 0] / NVFP4_UNIT
    elif weight.is_steep:
        factors = 2.0 ** (by_row.double() - 127 + 120)
    else:
        factors = halves(by_row * 128 + (120 << 7))[..., 0]
    return matrix * factors.repeat_interleave(matrix.shape[1] // by_row.shape[1], 1)


@pytest.mark.parametrize(("rows", "width"), [(40, 160), (300, 512), (256, 256)])
@pytest.mark.parametrize(("is_nvfp4", "highest"), [(True, 0x7E), (False, 134), (False, 240)])
def test_a_kernel_finds_every_value(is_nvfp4: bool, highest: int, rows: int, width: int) -> None:
    weight = random_weight(is_nvfp4, rows, width, highest=highest)
    staged = stage_weight(weight)
    assert staged.is_steep is (highest == 240) and staged.shape == (rows, width)
    assert staged.factor.item() == (1 / NVFP4_UNIT / 4 if is_nvfp4 else 1)
    values = values_of(staged)
    assert values.shape[0] == -(-rows // ROWS) * ROWS and not staged.flags.any()
    expected = dequantize(weight, torch.float64) * (4 if is_nvfp4 else 1)
    assert torch.equal(values[:rows, :width], expected)
    assert not values[rows:].any() and not values[:, width:].any()


def test_what_has_no_number_is_refused() -> None:
    for is_nvfp4, message in ((True, "a weight holds NaN"), (False, "a weight holds NaN")):
        weight = random_weight(is_nvfp4, 16, 32, highest=100)
        (weight.scales if is_nvfp4 else weight.data.view(torch.uint8)).view(-1)[3] = 0x7F
        with pytest.raises(ValueError, match=message):
            stage_weight(weight)
    swizzled = Nvfp4Tensor.empty(16, 64, ScaleLayout.SWIZZLED_128X4, device=CPU)
    with pytest.raises(ValueError, match=re.escape("the scales of a weight are linear, not swizzled")):
        stage_weight(swizzled)
