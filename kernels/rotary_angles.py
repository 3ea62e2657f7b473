"""Angles of the rotary embedding, once a step. T tokens, R rotated channels."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.rotary_angles import rotary_angles as reference_rotary_angles

RotaryAnglesFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]

LIBRARIES: tuple[Library[RotaryAnglesFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.rotary_angles", "rotary_angles"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_rotary_angles, graph_safe=True),
)


def rotary_angles(
    positions: Tensor,
    frequencies: Tensor,
    factor: Tensor,
    *,
    dtype: torch.dtype,
    library: Library[RotaryAnglesFunction],
) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, each times `factor`: computed in float64, rounded once to `dtype`.

    Shapes: positions [T] int64, frequencies [R / 2] and factor [] float64 -> two of [T, R / 2], contiguous.
    Errors: ValueError for shapes or dtypes that don't fit.
    Source: Su et al., RoFormer (2021).
    """
    fits = positions.dim() == 1 and frequencies.dim() == 1 and factor.dim() == 0
    if not (fits and positions.dtype == torch.int64 and frequencies.dtype == factor.dtype == torch.float64):
        found = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (positions, frequencies, factor))
        raise ValueError(f"rotary_angles: positions, frequencies, factor don't fit: {found}")
    return library.function(positions, frequencies, factor, dtype)
