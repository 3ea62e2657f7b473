"""The choice of one token of each row, greedy or with noise. L rows, C columns.

The noise is drawn by counter: it depends on a row's key and on the token id of a column, on nothing else. So it
doesn't matter in which shard, slot, rank or company a token is looked at, and a shard draws the noise of its own ids
only. With Gumbel noise the best of the noisy scores is a sample of softmax(logits / temperature), and the best of the
shards' bests is one of the whole row: no shard needs another's logits.

    draw(key, n) = mix((key + (n + 1) * golden ratio) mod 2^64), the n-th number of the SplitMix64 stream of `key`
    key of a row = draw(draw(0, seed), position)
    uniform      = (draw(key, id) >> 12 + 0.5) / 2^52, in the open interval (0, 1), exact in float64
    noise        = -log(-log(uniform))
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.sample import host_row_keys as reference_host_row_keys
from dist_infer.kernels.reference.sample import row_keys as reference_row_keys
from dist_infer.kernels.reference.sample import sample as reference_sample
from dist_infer.types import Int64Array

RowKeysFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
SampleFunction: TypeAlias = Callable[[Tensor, Tensor | int, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]

_TRITON = "dist_infer.kernels.triton.sample"
ROW_KEYS_LIBRARIES: tuple[Library[RowKeysFunction], ...] = (
    Library(name="triton", function=deferred(_TRITON, "row_keys"), is_available=on_triton, graph_safe=True),
    Library(name="torch", function=reference_row_keys),
)
LIBRARIES: tuple[Library[SampleFunction], ...] = (
    Library(name="triton", function=deferred(_TRITON, "sample"), is_available=on_triton, graph_safe=True),
    Library(name="torch", function=reference_sample),
)


def row_keys(seeds: Tensor, positions: Tensor, *, library: Library[RowKeysFunction] = ROW_KEYS_LIBRARIES[-1]) -> Tensor:
    """What keys the noise of a row: the seed of its request and the position of the token that is drawn.

    Shapes: all [L] int64.
    """
    return library.function(seeds, positions)


def host_row_keys(seeds: Int64Array, positions: Int64Array) -> Int64Array:
    """The same from and to arrays of the host.

    Shapes: all [L].
    """
    return reference_host_row_keys(seeds, positions)


def sample(
    logits: Tensor,
    ids: Tensor | int,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    *,
    library: Library[SampleFunction],
) -> tuple[Tensor, Tensor]:
    """(score, id) of the best column of each row by logit + temperature * noise, or by the logit alone.

    `ids` names the columns; a number is the first of consecutive ones. Equal scores go to the smaller id; ids that all
    rows share must ascend. NaN counts as -inf; a row of nothing else
    gives -inf and its smallest id. Scores are float64, so that the noise of a tiny temperature isn't rounded into a tie
    and no temperature overflows.

    Shapes: logits [L, C] with C > 0; ids [C] or [L, C] int64; temperature [L] float64 and keys [L] int64, both or none
        -> [L] float64, [L] int64.
    Errors: ValueError for other shapes or dtypes.
    Source: Gumbel, Statistical Theory of Extreme Values (1954); Steele, Lea, Flood, Fast Splittable Pseudorandom Number
        Generators (2014).
    """
    num_rows, num_columns = logits.shape
    if num_columns == 0:
        raise ValueError(f"sample: logits {list(logits.shape)} have no column")
    if isinstance(ids, Tensor) and (ids.dtype != torch.int64 or ids.shape not in (logits.shape, logits.shape[1:])):
        raise ValueError(f"sample: ids {ids.dtype} {list(ids.shape)} do not fit logits {list(logits.shape)}")
    if temperature is not None or keys is not None:
        fits = temperature is not None and keys is not None and temperature.shape == keys.shape == (num_rows,)
        if not fits or (temperature is not None and temperature.dtype != torch.float64):
            raise ValueError(f"sample: temperature (float64) and keys must both be [{num_rows}]")
    return library.function(logits, ids, temperature, keys)
