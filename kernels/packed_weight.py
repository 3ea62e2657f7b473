"""MXFP8 and NVFP4 weights in the order of the registers of a matrix unit. N outputs, K inputs.

A tile is 16 rows by 128 columns of NVFP4 or 64 of MXFP8: 1 KiB of data. A matrix unit's thread 4 g + c holds of the
rows g and g + 8 the eight columns from 8 c of every 32: one word of NVFP4, two of MXFP8. So a warp reads a tile as it
lies, 16 bytes a thread and row. In a word the elements of the pairs that masks bring out are neighbours: NVFP4 has the
codes 0 2 4 6 1 3 5 7 from the lowest nibble up, MXFP8 the codes 0 2 1 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.carriers import Mxfp8Tensor, Nvfp4Tensor, ScaleLayout

ROWS = 16  # of a tile
WORDS = 256  # of its data
_STEP = 128  # columns, of whole tiles
_CHUNK = 2**25  # elements that are packed at a time
_NAN = 0x7F  # of E4M3, its sign bit left out


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """Tiles row by row, and as many as are across, which kernels may read; rows and columns that don't exist are zeros.

    Shapes: shape (N, K); data [tiles, WORDS] int32; scales [tiles, scale_words] int32; global_scale 1 element.
    """

    data: Tensor
    scales: Tensor
    shape: tuple[int, int]
    columns: int  # of a tile
    global_scale: Tensor | None = None  # of NVFP4

    @property
    def is_nvfp4(self) -> bool:
        """Else it is MXFP8."""
        return self.columns == 128

    @property
    def tiles_across(self) -> int:
        """Tiles that hold the columns of a row, in steps of 128."""
        return _tiles_across(self.shape[1], self.columns)

    @property
    def scale_words(self) -> int:
        """Of a tile: by g, the scales of row g and those of row g + 8."""
        return self.scales.shape[1]


def pack_weight(weight: Nvfp4Tensor | Mxfp8Tensor) -> PackedWeight:
    """The weight for kernels that multiply few tokens.

    Errors: ValueError for scales that aren't linear, and for NaN, which has no number to be taken for.
    """
    if weight.layout is not ScaleLayout.LINEAR:
        raise ValueError(f"the scales of a weight are linear, not {weight.layout.value}")
    rows, width = weight.shape
    columns = 128 if isinstance(weight, Nvfp4Tensor) else 64
    num_groups, across = -(-rows // ROWS), _tiles_across(width, columns)
    num_tiles, scale_words = num_groups * across, 32 if columns == 128 else 8
    data = torch.zeros(num_tiles + across, WORDS, dtype=torch.int32, device=weight.data.device)
    scales = torch.zeros(num_tiles + across, scale_words, dtype=torch.int32, device=weight.data.device)
    codes, scale_bytes = weight.data.view(torch.uint8), weight.scales.view(rows, width // weight.BLOCK)
    groups_at_a_time = max(1, _CHUNK // (width * ROWS))
    for first in range(0, num_groups, groups_at_a_time):
        chunk = slice(first * ROWS, (first + groups_at_a_time) * ROWS)
        into = slice(first * across, (first + groups_at_a_time) * across)
        own_codes, own_scales = codes[chunk], scale_bytes[chunk]
        _refuse_nan(own_codes, own_scales, columns)
        packed = _packed_data(own_codes, across, columns)
        data[:num_tiles][into] = packed.view(-1, WORDS)
        scales[:num_tiles][into] = _packed_scales(own_scales, across, scale_words)
    global_scale = weight.global_scale if isinstance(weight, Nvfp4Tensor) else None
    return PackedWeight(data=data, scales=scales, shape=weight.shape, columns=columns, global_scale=global_scale)


def _tiles_across(width: int, columns: int) -> int:
    return -(-width // _STEP) * (_STEP // columns)


def _refuse_nan(codes: Tensor, scales: Tensor, columns: int) -> None:
    in_e4m3 = scales if columns == 128 else codes
    if bool((in_e4m3 & 0x7F == _NAN).any()):
        raise ValueError("a weight holds NaN")


def _packed_data(codes: Tensor, across: int, columns: int) -> Tensor:
    """Bytes of rows to words of tiles [groups, tiles, WORDS]."""
    row_bytes = 64  # of a tile
    rows, width = codes.shape
    padded = functional.pad(codes, (0, across * row_bytes - width, 0, -rows % ROWS))
    groups = padded.shape[0] // ROWS
    if columns == 128:
        even, odd = padded.view(*padded.shape[:1], -1, 2).unbind(-1)  # bytes of the codes 0 1 | 2 3
        low, high = (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)
        words = torch.stack([low.view(*low.shape[:1], -1, 2), high.view(*high.shape[:1], -1, 2)], -2)
        fields = words.view(groups, 2, 8, across, 4, 4, 4)  # group, half, g, tile, 32 columns, c, byte
        order = (0, 3, 1, 2, 5, 4, 6)
    else:
        words = padded.view(*padded.shape[:1], -1, 2, 2).transpose(-1, -2)
        fields = words.reshape(groups, 2, 8, across, 2, 4, 8)  # group, half, g, tile, 32 columns, c, byte
        order = (0, 3, 1, 2, 5, 4, 6)
    return fields.permute(order).contiguous().view(torch.int32).view(groups, across, WORDS)


def _packed_scales(scales: Tensor, across: int, scale_words: int) -> Tensor:
    """Bytes of rows to words of tiles [groups * tiles, scale_words]."""
    blocks = scale_words // 4  # of a row of a tile: 8 or 2
    rows, width = scales.shape
    padded = functional.pad(scales, (0, across * blocks - width, 0, -rows % ROWS))
    fields = padded.view(-1, 2, 8, across, blocks)  # group, half, g, tile, block
    return fields.permute(0, 3, 2, 1, 4).reshape(-1, 4 * scale_words).view(torch.int32)
