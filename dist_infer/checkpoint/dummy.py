"""Seeded random weights from shapes alone: for trying a geometry without its checkpoint.

An element depends on the seed, the tensor's name and its global index, and on nothing else, so every layout over ranks
gives the same model. The hash is counter-based: a 32-bit key for each row, one for each column, mixed for each element
in wrapping int32 arithmetic, which is exact on every device. Row and column keys are hashed on their own first;
otherwise rows would be shifted or permuted copies of each other.

Values are uniform. Matrices get the deviation 1 / sqrt(columns), so activations keep their size from layer to layer;
norms lie around 1.
"""

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_infer.errors import CheckpointError
from dist_infer.layers.weights import WeightSlot
from dist_infer.types import Int64Array

# Elements that are mixed at once: as many as stay in a core's cache; on a GPU so many that launches don't count.
_CPU_CHUNK = 1 << 17
_GPU_CHUNK = 1 << 25
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)  # as a signed int32
_NORM_SPREAD = 0.1
_BIAS_STD = 0.1


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class DummySource:
    """A source with exactly the tensors that the slots ask for, in the dtype and on the device of their parameters."""

    def __init__(self, slots: Iterable[WeightSlot], seed: int) -> None:
        self._seed = seed
        self._tensors = {slot.name: _Tensor(slot.shape, slot.into.dtype, slot.into.device) for slot in slots}

    @property
    def location(self) -> str:
        """For messages."""
        return f"dummy weights of seed {self._seed}"

    def names(self) -> Collection[str]:
        """All tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the parameter; values are made in float32 and cast."""
        return self._tensors[name].dtype

    def file_of(self, name: str) -> str:
        """For messages."""
        return self.location

    def read(self, name: str, take: tuple[range, ...]) -> Tensor:
        """The part that `take` cuts out."""
        tensor = self._tensors[name]
        if not tensor.dtype.is_floating_point:
            raise CheckpointError(f"{self.location}: tensor {name!r} of {tensor.dtype} can't be random")
        rows = _row_ids(tensor.shape[:-1], take[:-1])
        columns = take[-1] if take else range(1)
        part = torch.empty((len(rows), len(columns)), dtype=tensor.dtype, device=tensor.device)
        if part.numel():
            _fill(part, _keys(self._seed, name, rows, columns), *_centre_and_spread(name, tensor.shape))
        return part.reshape([len(r) for r in take])


def _row_ids(shape: tuple[int, ...], take: tuple[range, ...]) -> Int64Array:
    """Global index of each taken row when all dims but the last are flattened."""
    ids = np.zeros(1, np.int64)
    for size, part in zip(shape, take, strict=True):
        ids = (ids[:, None] * size + np.arange(part.start, part.stop, dtype=np.int64)).reshape(-1)
    return ids


def _centre_and_spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Middle and half width of the uniform distribution."""
    if len(shape) > 1:
        return 0.0, math.sqrt(3.0 / shape[-1])
    if name.endswith("bias"):
        return 0.0, math.sqrt(3.0) * _BIAS_STD
    return 1.0, _NORM_SPREAD


def _keys(seed: int, name: str, rows: Int64Array, columns: range) -> tuple[Tensor, Tensor]:
    """Hashed int32 keys of the rows and of the columns."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    row_key, column_key = np.frombuffer(digest, np.uint64)
    column_ids = np.arange(columns.start, columns.stop, dtype=np.int64)
    return _hash64(rows, row_key), _hash64(column_ids, column_key)


def _hash64(ids: Int64Array, key: np.uint64) -> Tensor:
    """The upper half of the splitmix64 finaliser of key + (id + 1) * golden ratio."""
    with np.errstate(over="ignore"):
        x = key + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(32)).astype(np.uint32).view(np.int32).copy())


def _fill(part: Tensor, keys: tuple[Tensor, Tensor], centre: float, spread: float) -> None:
    """Writes centre + spread * u with u uniform in (-1, 1), some rows at a time."""
    row_keys, column_keys = (key.to(part.device) for key in keys)
    chunk = _CPU_CHUNK if part.device.type == "cpu" else _GPU_CHUNK
    step = max(1, chunk // part.shape[1])
    width = min(part.shape[1], chunk)
    for top in range(0, part.shape[0], step):
        for left in range(0, part.shape[1], width):
            x = row_keys[top : top + step, None] ^ column_keys[None, left : left + width]
            values = _mix(x).to(torch.float32).add_(0.5).mul_(spread * 2.0**-23)
            part[top : top + step, left : left + width] = values.add_(centre) if centre else values


def _mix(x: Tensor) -> Tensor:
    """Scatters int32 keys over the integers of 24 bits, in place."""
    x.mul_(_M1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_M2)
    return x.bitwise_right_shift_(8)
