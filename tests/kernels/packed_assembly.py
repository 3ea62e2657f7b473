"""What the assembly of kernels/triton/packed_tiles.py does, instruction by instruction, for Triton's interpreter.

A tensor there has one element a thread, so that even the product of a warp's matrices can be told from the arrays.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_infer.kernels.triton import packed_tiles, weight_tiles
from tests.kernels.triton_interpreter import INLINE_ASM

Array = npt.NDArray[Any]
_HIGH = np.uint32(0xFFFF0000)


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint32)


def _times(words: Array, factors: Array) -> Array:
    """mul.bf16x2."""
    low = _rounded(_bits(words) << np.uint32(16), _bits(factors) << np.uint32(16))
    return (low >> np.uint32(16)) | _rounded(_bits(words) & _HIGH, _bits(factors) & _HIGH)


def _rounded(word: Array, factor: Array) -> Array:
    """The product of two bfloat16, as the upper half of a word."""
    product = torch.from_numpy(word.view(np.float32) * factor.view(np.float32)).bfloat16()
    rounded: Array = product.float().numpy().view(np.uint32)
    return rounded


def _all(word: int, like: Array) -> Array:
    return np.full_like(_bits(like), word)


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """prmt.b32."""
    both = np.concatenate([_bits(a)[..., None].view(np.uint8), _bits(b)[..., None].view(np.uint8)], -1)
    places = np.stack([(selector >> (4 * idx)) & 7 for idx in range(4)], -1).astype(np.int64)
    return np.ascontiguousarray(np.take_along_axis(both, places, -1)).view(np.uint32)[..., 0]


def _select(a: Array, b: Array, selector: int) -> Array:
    return _permuted(a, b, np.full(a.shape, selector, np.int64))


def _ints(*words: Array) -> tuple[Array, ...]:
    return tuple(word.view(np.int32) for word in words)


def pairs_of_e2m1(word: Array, scale: Array) -> tuple[Array, ...]:
    w, mask = _bits(word), np.uint32(0x81C081C0)
    first = ((w & np.uint32(0x000F000F)) * np.uint32(4160)) & mask
    second = ((w & np.uint32(0x00F000F0)) * np.uint32(260)) & mask
    third = (((w >> np.uint32(8)) & np.uint32(0x000F000F)) * np.uint32(4160)) & mask
    fourth = ((w >> np.uint32(6)) & np.uint32(0x01C001C0)) | (w & np.uint32(0x80008000))
    return _ints(*(_times(pair, scale) for pair in (first, second, third, fourth)))


def pairs_of_e4m3(word: Array, scale: Array) -> tuple[Array, ...]:
    w, sign, size = _bits(word), np.uint32(0x80008000), np.uint32(0x07F007F0)
    first = ((w << np.uint32(8)) & sign) | ((w << np.uint32(4)) & size)
    second = (w & sign) | ((w >> np.uint32(4)) & size)
    return _ints(*(_times(_times(pair, _all(0x7B807B80, word)), scale) for pair in (first, second)))


def nvfp4_scales(low: Array, high: Array, selector: Array) -> tuple[Array, ...]:
    four = _permuted(low, high, selector.astype(np.int64))
    results = []
    for places in (0x1404, 0x3424):
        wide = _select(four, np.zeros_like(four), places) >> np.uint32(4)
        wide = _times(_times(wide, _all(0x7E807E80, four)), _all(0x77007700, four))
        results += [_select(wide, wide, 0x1010), _select(wide, wide, 0x3232)]
    return _ints(*results)


def mxfp8_scales(word: Array) -> tuple[Array, ...]:
    results = []
    for places in (0x0404, 0x1414, 0x2424, 0x3434):
        wide = _select(_bits(word), np.zeros_like(_bits(word)), places) >> np.uint32(1)
        low = np.maximum(wide & np.uint32(0xFFFF), np.uint32(0x40))
        results.append(low | (np.maximum(wide >> np.uint32(16), np.uint32(0x40)) << np.uint32(16)))
    return _ints(*results)


def multiply_add(*operands: Array) -> tuple[Array, ...]:
    """mma.sync m16n8k16 of each warp: which thread holds which elements is as the PTX manual has it."""
    *words, c0, c1, c2, c3 = operands
    a0, a1, a2, a3, b0, b1 = (_elements(word) for word in words)  # [warp, g, c, element]
    upper, lower = _columns(a0, a2), _columns(a1, a3)
    inputs = _columns(b0, b1)  # [warp, token g, 16]
    sums = np.einsum("wgk,wtk->wgt", np.concatenate([upper, lower], 1), inputs).reshape(-1, 2, 8, 4, 2)
    own = (sums[:, 0, ..., 0], sums[:, 0, ..., 1], sums[:, 1, ..., 0], sums[:, 1, ..., 1])
    return tuple((c + part.reshape(c.shape)).astype(np.float32) for c, part in zip((c0, c1, c2, c3), own, strict=True))


def _elements(word: Array) -> Array:
    halves = np.ascontiguousarray(word).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return halves.view(np.float32).astype(np.float64).reshape(-1, 8, 4, 2)


def _columns(first: Array, second: Array) -> Array:
    """Sixteen columns of eight rows, from the registers that hold columns 2 c and 2 c + 8."""
    return np.concatenate([first.reshape(-1, 8, 8), second.reshape(-1, 8, 8)], -1)


STAND_INS: Mapping[Any, Any] = {
    weight_tiles.PAIRS_OF_E2M1: pairs_of_e2m1,
    weight_tiles.PAIRS_OF_E4M3: pairs_of_e4m3,
    packed_tiles._NVFP4_SCALES: nvfp4_scales,
    packed_tiles._MXFP8_SCALES: mxfp8_scales,
    packed_tiles._MMA: multiply_add,
}


def install() -> None:
    """From now on the interpreter knows it."""
    INLINE_ASM.update({assembly.value: function for assembly, function in STAND_INS.items()})
