"""Forms of the grouped products with quantised weights, by how many pairs an expert has on average.

Data, measured on an H200.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dist_infer.kernels.cute.grouped_gemm_parts import SHORT
from dist_infer.kernels.scaled_linear import WeightFormat


class Form(NamedTuple):
    """What of a variant is not what is computed; see quantized_parts.Variant."""

    sizes: tuple[int, ...]
    num_stages: int
    num_groups: int
    num_ctas: int = 1
    streams: bool = False

    @property
    def is_short(self) -> bool:
        """Tiles needn't be sorted."""
        return self.sizes[-1] <= SHORT


_FEW, _SOME, _MORE, _MANY = (8, 16), (8, 16, 24, 32), (16, 24, 32, 40, 48), (16, 32, 48, 64, 80, 96, 112, 120, 128)

# Up to so many pairs an expert: of gate and up, and of down.
FORMS: Mapping[WeightFormat, Sequence[tuple[float, Form, Form]]] = MappingProxyType(
    {
        WeightFormat.FP8_BLOCK: (
            (0.25, Form(_FEW, 5, 1, 2, streams=True), Form(_FEW, 5, 1, 2, streams=True)),
            (4, Form(_FEW, 2, 2, 2, streams=True), Form(_FEW, 2, 2, 2, streams=True)),
            (16, Form(_SOME, 5, 2), Form(_SOME, 5, 2)),
            (40, Form(_MORE, 5, 2), Form(_MORE, 5, 2)),
            (float("inf"), Form(_MANY, 4, 2), Form(_MANY, 4, 2)),
        ),
        WeightFormat.MXFP8: (
            (4, Form(_FEW, 2, 2, 2, streams=True), Form(_FEW, 2, 2, 2, streams=True)),
            (16, Form(_SOME, 2, 2, 2, streams=True), Form(_SOME, 2, 2, 2, streams=True)),
            (float("inf"), Form(_MANY, 3, 2), Form(_MANY, 3, 2)),
        ),
        WeightFormat.NVFP4: (
            (1, Form(_FEW, 3, 2, 2), Form(_FEW, 3, 2, 2)),
            (3, Form(_FEW, 4, 1, 3), Form(_FEW, 3, 2, 2)),
            (8, Form(_FEW, 3, 2, 2), Form(_FEW, 3, 2, 2)),
            (16, Form(_SOME, 3, 2, 2), Form(_SOME, 3, 2, 2)),
            (48, Form(_MANY, 4, 2), Form(_SOME, 3, 2, 2)),
            (float("inf"), Form(_MANY, 4, 2), Form(_MANY, 4, 2)),
        ),
    }
)

# Up to so many pairs an expert the products of Triton, of each pair by itself, are faster.
_BY_TRITON: Mapping[WeightFormat, float] = MappingProxyType(
    {WeightFormat.FP8_BLOCK: 0.1, WeightFormat.MXFP8: 0.2, WeightFormat.NVFP4: 0.1}
)


def are_too_few(weight_format: WeightFormat, num_pairs: int, num_experts: int) -> bool:
    """The products of Triton are faster, or there is nothing to compute."""
    return num_pairs <= _BY_TRITON[weight_format] * num_experts


def forms_for(weight_format: WeightFormat, num_pairs: int, num_experts: int) -> tuple[Form, Form]:
    """(of gate and up, of down): the measured best."""
    choices = FORMS[weight_format]
    return next((first, second) for density, first, second in choices if num_pairs <= density * num_experts)
