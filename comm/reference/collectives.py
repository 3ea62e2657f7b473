"""The collectives on lists: entry r of a list is rank r's tensor. Slow and obvious: what comm.collectives must give."""

from collections.abc import Sequence

import torch
from torch import Tensor


def all_reduce(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets the sum in rank order from +0.0, in float32 (float64 for float64), rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(inputs[0].shape, dtype=wide, device=inputs[0].device)
    for x in inputs:
        total = total + x.to(wide)
    return [total.to(dtype) for _ in inputs]


def all_gather(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Every rank gets all rows in rank order."""
    return [torch.cat(list(inputs)) for _ in inputs]


def reduce_scatter(inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Rank r gets the next `sizes[r]` rows of the sum."""
    total = all_reduce(inputs)[0]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [total[start : start + rows] for start, rows in zip(starts, sizes, strict=True)]


def broadcast(inputs: Sequence[Tensor], root: int) -> list[Tensor]:
    """Every rank gets what rank `root` has."""
    return [inputs[root].clone() for _ in inputs]


def all_to_all(inputs: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Rank s sends rank t its next `sizes[s][t]` rows; each gets what is meant for it in rank order."""
    slices = [torch.split(x, list(row)) for x, row in zip(inputs, sizes, strict=True)]
    return [torch.cat([slices[source][target] for source in range(len(inputs))]) for target in range(len(inputs))]
