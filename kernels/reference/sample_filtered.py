"""The choice of a token among the likeliest in plain torch; the contract stands in kernels/sample_filtered.py."""

import torch
from torch import Tensor

from dist_infer.kernels.reference.sample import sample

_ROWS_ELEMENTS = 2**23  # elements that are sorted at a time: 64 MiB for each float64 or int64 of them
_UNIT = 2.0**45


def sample_filtered(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """See `dist_infer.kernels.sample_filtered.sample_filtered`."""
    step = max(1, _ROWS_ELEMENTS // logits.shape[1])
    options = (temperature, top_k, top_p, min_p, keys)
    parts = [
        _sample_rows(logits[first : first + step], *(option[first : first + step] for option in options))
        for first in range(0, max(1, len(logits)), step)
    ]
    return torch.cat(parts)


def _sample_rows(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    clean = logits.masked_fill(logits.isnan(), -torch.inf)
    values, columns = clean.sort(dim=1, descending=True, stable=True)
    values = values.double()
    kept = kept_prefix(values, temperature, top_k, top_p, min_p)
    _, chosen = sample(values.masked_fill(~kept, -torch.inf), columns, temperature, keys)
    return chosen


def kept_prefix(values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of the values are in. Shapes: values [L, C] float64, largest first; the others [L] -> [L, C] bool."""
    places = torch.arange(values.shape[1], device=values.device)
    first = values[:, :1]
    # The largest ones are 0 by definition: -inf or +inf minus itself would be NaN.
    weights = torch.where(values == first, 0.0, (values - first) / temperature[:, None]).exp()
    counts = torch.where(top_k > 0, top_k, values.shape[1])
    candidates = (weights >= min_p[:, None]) & (places < counts[:, None])
    units = (weights * _UNIT + 0.5).floor().long().masked_fill(~candidates, 0)
    before = units.cumsum(1) - units
    limit = (top_p * units.sum(1).double()).ceil().long()
    inside = (before < limit[:, None]) | (top_p >= 1)[:, None]
    return (inside & candidates) | (places == 0)
