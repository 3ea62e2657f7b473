"""How the token of each row of a step is chosen, on the host and on the device. L rows."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor

from dist_infer.types import Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """How the token of each row is chosen. Shapes: [L] each."""

    temperature: Float64Array  # 0 for greedy rows, whatever else they ask for
    keys: Int64Array  # of the noise
    top_k: Int64Array  # 0: off
    top_p: Float64Array
    min_p: Float64Array
    is_filtered: bool  # a row that isn't greedy has top_k, top_p or min_p

    def columns(self) -> Iterator[tuple[str, Float64Array | Int64Array]]:
        """The arrays by name, those of RowOptions."""
        yield from ((field.name, getattr(self, field.name)) for field in fields(RowOptions))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """The same on the device. Shapes: [L] each; keys and top_k int64, the others float64."""

    temperature: Tensor
    keys: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
