"""The largest values of each row in plain torch; the contract stands in kernels/top_k.py.

torch.topk doesn't say which of equal values it takes, and a stable sort of the whole row costs much more. So torch.topk
gives the k-th largest value only; what is above it is taken, and of what equals it as many as are missing, from the
left.
"""

import torch
from torch import Tensor


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.top_k.top_k`."""
    values = values.masked_fill(values.isnan(), -torch.inf)
    columns = _columns_of_largest(values, k) if k < values.shape[1] else None
    kept = values if columns is None else values.gather(1, columns)
    kept, order = kept.sort(dim=1, descending=True, stable=True)
    return kept, order if columns is None else columns.gather(1, order)


def _columns_of_largest(values: Tensor, k: int) -> Tensor:
    """In ascending order, without a wait for the device."""
    least = values.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = values > least, values == least
    missing = k - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= missing))
    place = torch.where(kept, kept.cumsum(1) - 1, k)  # what isn't kept goes to a column that is cut off
    columns = torch.arange(values.shape[1], device=values.device).expand_as(values)
    return columns.new_empty(len(values), k + 1).scatter_(1, place, columns)[:, :k]
