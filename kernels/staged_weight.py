"""MXFP8 and NVFP4 weights in the order in which the stages of a kernel take them. N outputs, K inputs.

A stage is 256 rows by 256 columns of NVFP4 or 128 of MXFP8, so that one copy brings it: four parts of 64 rows, each two
tiles of half the columns. A tile holds the words of its data, then its scales. A matrix unit's thread 4 g + c of warp w
wants of every 16 columns the elements 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of the rows 16 w + g and 16 w + g + 8: half a
word of NVFP4, a word of MXFP8. It reads four words of a row at once.

In a word the bits stand so that a rotation and a mask bring out a pair of elements as two bfloat16, sign, exponent and
fraction where they belong (`nvfp4_words`, `mxfp8_words`). The scale of an NVFP4 block is kept with five bits of
exponent and three of fraction, so that it has no denormals: times 16 and with a bias it is a bfloat16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dist_infer.kernels.carriers import Mxfp8Tensor, Nvfp4Tensor, ScaleLayout

ROWS = 256  # of a stage
MAX_CTAS = 256  # of a product
TILE_BYTES = {True: 4096 + 512, False: 4096 + 128}  # of NVFP4, of MXFP8
COLUMNS = {True: 256, False: 128}  # of a stage
_CHUNK = 2**25  # elements that are put in order at a time
_NAN = 0x7F  # of E4M3, its sign bit left out
NVFP4_UNIT = 2.0**-8  # what a kernel makes of an NVFP4 value 1
LARGEST_GENTLE = 134  # byte of a UE8M0 scale that goes into one factor with what E4M3 lacks: see staged_multiply


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeight:
    """Stages of 256 rows one after the other; rows and columns that don't exist are zeros.

    Shapes: shape (N, K); data [words] int32; factor 1 element, what sums are multiplied by; flags
        [16 * MAX_CTAS] int32, zeros between launches.
    """

    data: Tensor
    factor: Tensor
    flags: Tensor  # a product's warps say by them that a part of a sum is there
    shape: tuple[int, int]
    is_nvfp4: bool  # else it is MXFP8
    is_steep: bool  # MXFP8 with scales above 2^7

    @property
    def num_stages(self) -> int:
        """Across the columns."""
        return -(-self.shape[1] // COLUMNS[self.is_nvfp4])

    @property
    def num_bytes(self) -> int:
        """Of all of it."""
        return self.data.nbytes + self.factor.nbytes + self.flags.nbytes


def stage_weight(weight: Nvfp4Tensor | Mxfp8Tensor) -> StagedWeight:
    """The weight in order.

    Errors: ValueError for scales that aren't linear, and for NaN, which has no number to be taken for.
    """
    if weight.layout is not ScaleLayout.LINEAR:
        raise ValueError(f"the scales of a weight are linear, not {weight.layout.value}")
    is_nvfp4 = isinstance(weight, Nvfp4Tensor)
    rows, width = weight.shape
    across, groups = -(-width // COLUMNS[is_nvfp4]), -(-rows // ROWS)
    tile_words = TILE_BYTES[is_nvfp4] // 4
    codes, scales = weight.data.view(torch.uint8), weight.scales.view(rows, width // weight.BLOCK)
    if bool(((scales if is_nvfp4 else codes) & 0x7F == _NAN).any()):
        raise ValueError("a weight holds NaN")
    data = torch.empty(groups, across, 4, 2, tile_words, dtype=torch.int32, device=codes.device)
    groups_at_a_time = max(1, _CHUNK // (width * ROWS))
    for first in range(0, groups, groups_at_a_time):
        into = data[first : first + groups_at_a_time]
        chunk = slice(first * ROWS, (first + groups_at_a_time) * ROWS)
        in_order = _nvfp4_tiles if is_nvfp4 else _mxfp8_tiles
        words, own_scales = in_order(codes[chunk], scales[chunk], across)
        into[..., :1024] = words
        into[..., 1024:] = own_scales
    factor = torch.ones(1, device=codes.device)
    if isinstance(weight, Nvfp4Tensor):
        scale = factor if weight.global_scale is None else weight.global_scale
        factor = 1.0 / NVFP4_UNIT / scale
    return StagedWeight(
        data=data.view(-1),
        factor=factor,
        flags=torch.zeros(16 * MAX_CTAS, dtype=torch.int32, device=codes.device),
        shape=weight.shape,
        is_nvfp4=is_nvfp4,
        is_steep=not is_nvfp4 and int(scales.max()) > LARGEST_GENTLE,
    )


def _nvfp4_tiles(codes: Tensor, scales: Tensor, across: int) -> tuple[Tensor, Tensor]:
    """Words of data [groups, across, 4, 2, 1024] and of scales [..., 128], from rows of both."""
    alive = (scales != 0).repeat_interleave(16 // 2, 1)  # whatever a scale of zero meets is a zero
    codes = _whole(codes * alive, across * 128)
    even, odd = (codes & 15).to(torch.int32), (codes >> 4).to(torch.int32)
    pairs = [fields.view(-1, 4, 4, 2, 8, across, 2, 4, 4, 4).unbind(-2) for fields in (even, odd)]
    words = nvfp4_words(*pairs)  # group, part, warp, half, g, across, tile, word, c
    by_stage = words.permute(0, 5, 1, 6, 2, 3, 4, 8, 7).reshape(-1, across, 4, 2, 1024)
    fields = _whole(_wide_scales(scales), across * 16).view(-1, 4, 4, 2, 8, across, 2, 8)
    own_scales = fields.permute(0, 5, 1, 6, 2, 4, 7, 3).reshape(-1, across, 4, 2, 512)
    return by_stage, own_scales.view(torch.int32)


def nvfp4_words(even: tuple[Tensor, ...], odd: tuple[Tensor, ...]) -> Tensor:
    """Words of four pairs of codes, int32."""
    word = torch.zeros_like(even[0])
    for half, codes in enumerate((even, odd)):
        up = 16 * half
        signs, sizes = [code >> 3 for code in codes], [code & 7 for code in codes]
        word |= (signs[0] << (15 + up)) | (sizes[0] << (6 + up))
        word |= (signs[1] << (21 - up)) | (sizes[1] << (12 + up))  # 6 bits higher, around the end of the word
        word |= (signs[2] << (9 + up)) | (sizes[2] << up)  # 6 bits lower
        word |= (signs[3] << (19 - up)) | ((sizes[3] & 3) << (10 + up)) | ((sizes[3] >> 2) << (4 + up))
    return word


def _wide_scales(scales: Tensor) -> Tensor:
    """E4M3 bytes with five bits of exponent instead of four: no denormals, and 0 is the only small one."""
    exponent, fraction = scales >> 3, scales & 7
    top = (fraction >= 2).to(torch.uint8) + (fraction >= 4).to(torch.uint8)
    denormal = ((top + 1) << 3) | ((fraction << (3 - top)) & 7)
    return torch.where(exponent == 0, torch.where(fraction == 0, 0, denormal), ((exponent + 3) << 3) | fraction)


def _mxfp8_tiles(codes: Tensor, scales: Tensor, across: int) -> tuple[Tensor, Tensor]:
    """Words of data [groups, across, 4, 2, 1024] and of scales [..., 32], from rows of both."""
    fields = _whole(codes, across * 128).to(torch.int32).view(-1, 4, 4, 2, 8, across, 2, 4, 2, 4, 2)
    words = mxfp8_words(fields)  # group, part, warp, half, g, across, tile, word, c
    by_stage = words.permute(0, 5, 1, 6, 2, 3, 4, 8, 7).reshape(-1, across, 4, 2, 1024)
    own = _whole(scales, across * 4).view(-1, 4, 4, 2, 8, across, 2, 2)
    own_scales = own.permute(0, 5, 1, 6, 2, 4, 7, 3).reshape(-1, across, 4, 2, 128)
    return by_stage, own_scales.view(torch.int32)


def mxfp8_words(codes: Tensor) -> Tensor:
    """Words of codes [..., pair, c, element], int32 [..., c]."""
    word = torch.zeros_like(codes[..., 0, :, 0])
    for half in range(2):
        first, second = codes[..., 0, :, half], codes[..., 1, :, half]
        word |= (((first & 0x80) << 8) | ((first & 0x7F) << 4)) << (16 * half)
        word |= (((second >> 7) << 3) | (second & 7) | ((second & 0x78) << 8)) << (16 * half)
    return word


def _whole(fields: Tensor, width: int) -> Tensor:
    """With zeros for what is missing of a stage."""
    return functional.pad(fields, (0, width - fields.shape[1], 0, -fields.shape[0] % ROWS))
