"""The largest values of each row. L rows, C columns."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.reference.top_k import top_k as reference_top_k

TopKFunction: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Tensor]]

LIBRARIES: tuple[Library[TopKFunction], ...] = (Library(name="torch", function=reference_top_k),)


def top_k(values: Tensor, k: int, *, library: Library[TopKFunction]) -> tuple[Tensor, Tensor]:
    """(values, columns) of the k largest of each row, largest first; of equal values the smaller column comes first.

    NaN counts as -inf.

    Shapes: values [L, C], 0 < k <= C -> [L, k] of the same dtype, [L, k] int64.
    Errors: ValueError for another k.
    """
    if values.dim() != 2 or not 0 < k <= values.shape[1]:
        raise ValueError(f"top_k: {k} of values {list(values.shape)}")
    return library.function(values, k)
