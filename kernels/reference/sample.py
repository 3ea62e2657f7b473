"""The choice of a token and the noise for it in plain torch; the contract stands in kernels/sample.py."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bits = TypeVar("Bits", Tensor, npt.NDArray[np.int64])

_NOISY_ELEMENTS = 2**20  # noise is drawn for so many elements at a time: 8 MiB for each float64 or int64 of them


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


# SplitMix64: the golden ratio, and the two multipliers of its finaliser.
_GOLDEN, _FIRST, _SECOND = (_signed(bits) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def draw(keys: Bits, numbers: Bits) -> Bits:
    """64 random bits for each pair of a key and a number; on arrays of the host too.

    Shapes: int64, broadcast against each other.
    """
    bits = keys + _GOLDEN + numbers * _GOLDEN
    bits ^= _shift_right(bits, 30)
    bits *= _FIRST
    bits ^= _shift_right(bits, 27)
    bits *= _SECOND
    bits ^= _shift_right(bits, 31)
    return bits


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each column, finite: between -3.6 and 36.8.

    Shapes: keys [L], ids [C] or [L, C] -> [L, C] float64.
    """
    uniform = _shift_right(draw(keys[:, None], ids), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """See `dist_infer.kernels.sample.row_keys`."""
    return draw(draw(torch.zeros_like(seeds), seeds), positions)


def host_row_keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same on the host, which takes less time than a device for the few rows of a step."""
    return draw(draw(np.zeros_like(seeds), seeds), positions)


def sample(logits: Tensor, ids: Tensor | int, temperature: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.sample.sample`."""
    if isinstance(ids, int):
        ids = torch.arange(ids, ids + logits.shape[1], device=logits.device)
    if temperature is None or keys is None:
        return _best(logits, ids)
    step = max(1, _NOISY_ELEMENTS // logits.shape[1])
    bests = [
        _best(
            gumbel_noise(keys[first : first + step], rows_ids := ids if ids.dim() == 1 else ids[first : first + step])
            .mul_(temperature[first : first + step, None])
            .add_(logits[first : first + step]),
            rows_ids,
        )
        for first in range(0, max(1, len(logits)), step)
    ]
    scores, best_ids = zip(*bests, strict=True)
    return torch.cat(scores), torch.cat(best_ids)


def _best(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best, first_columns = scores.max(1)  # of equal ones torch gives the first
    if ids.dim() == 1:
        return best.double(), ids[first_columns]
    nobody = torch.iinfo(torch.int64).max
    return best.double(), torch.where(scores == best[:, None], ids, nobody).amin(1)


def _shift_right(bits: Bits, count: int) -> Bits:
    """Zeros come in from the left, where int64's own shift would repeat the sign."""
    shifted = bits >> count
    shifted &= (1 << 64 - count) - 1
    return shifted
