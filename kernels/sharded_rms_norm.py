"""RMSNorm over channels of which each rank holds a part: sums of squares, then, once they are added up, the scaling.

T tokens, D channels of this rank.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.sharded_rms_norm import scale_rows as reference_scale_rows
from dist_infer.kernels.reference.sharded_rms_norm import square_sum as reference_square_sum

SquareSumFunction: TypeAlias = Callable[[Tensor], Tensor]
ScaleRowsFunction: TypeAlias = Callable[[Tensor, Tensor, int, Tensor, float], Tensor]

SQUARE_SUM_LIBRARIES: tuple[Library[SquareSumFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.sharded_rms_norm", "square_sum"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_square_sum),
)
SCALE_ROWS_LIBRARIES: tuple[Library[ScaleRowsFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.sharded_rms_norm", "scale_rows"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_scale_rows),
)


def square_sum(x: Tensor, *, library: Library[SquareSumFunction]) -> Tensor:
    """The sum of squares of each row, in float32 (float64 for float64).

    Shapes: x [T, D] -> [T].
    Errors: ValueError for another shape.
    """
    if x.dim() != 2:
        raise ValueError(f"square_sum: x {list(x.shape)} is not [tokens, channels]")
    return library.function(x)


def scale_rows(
    x: Tensor,
    square_sums: Tensor,
    num_channels: int,
    weight: Tensor,
    eps: float,
    *,
    library: Library[ScaleRowsFunction],
) -> Tensor:
    """x * rsqrt(square_sums / num_channels + eps) * weight, rounded once; `num_channels` are those of all ranks.

    Shapes: x [T, D], square_sums [T] float32 (float64 for float64), weight [D] -> [T, D].
    Errors: ValueError for shapes or dtypes that don't fit.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    fits = x.dim() == 2 and weight.shape == x.shape[1:] and square_sums.shape == x.shape[:1]
    if not fits or weight.dtype != x.dtype or square_sums.dtype != wide:
        found = ", ".join(f"{y.dtype} {list(y.shape)}" for y in (x, square_sums, weight))
        raise ValueError(f"scale_rows: x, square_sums, weight don't fit: {found}")
    return library.function(x, square_sums, num_channels, weight, eps)
