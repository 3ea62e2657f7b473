"""Host arrays to the device by one copy, for which the host doesn't wait."""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from dist_infer.types import Float64Array, Int32Array, Int64Array

HostArray: TypeAlias = Int32Array | Int64Array | Float64Array

_WORD_BYTES = 8
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


def upload(arrays: Mapping[str, HostArray], device: torch.device, *, into: Tensor | None = None) -> dict[str, Tensor]:
    """The arrays on the device, each in its own dtype and shape.

    `into` is memory to fill from its start, one after another, each at a whole word.

    Shapes: into [words] int64, contiguous, at least `num_words` of all arrays.
    Stream: the current one; the host waits for nothing.
    """
    if device.type == "cpu" and into is None:
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    counts = [num_words(array) for array in arrays.values()]
    total = sum(counts)
    # A fresh pinned buffer each time: torch hands it out again only when the copy out of it is done.
    staging = torch.empty(total, dtype=torch.int64, pin_memory=device.type == "cuda")
    words = staging.numpy()
    start = 0
    for count, array in zip(counts, arrays.values(), strict=True):
        words[start : start + count].view(array.dtype)[: array.size] = array.reshape(-1)
        start += count
    sent = staging.to(device, non_blocking=True) if into is None else _fill(into[:total], staging)
    parts = sent.split_with_sizes(counts)
    return {
        name: part.view(_TORCH_DTYPES[array.dtype])[: array.size].view(array.shape)
        for part, (name, array) in zip(parts, arrays.items(), strict=True)
    }


def _fill(memory: Tensor, staging: Tensor) -> Tensor:
    return memory.copy_(staging, non_blocking=True)


def num_words(array: HostArray) -> int:
    """Words of 8 bytes that an array takes."""
    return -(-array.nbytes // _WORD_BYTES)
