"""Matrix products cut over the tensor-parallel ranks. T tokens, K inputs, N outputs.

A column-parallel layer gives each rank some outputs and needs no exchange; a row-parallel one gives each rank some
inputs, and the results must be summed. Parts may be uneven, down to nothing. Each rank quantises its own part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dist_infer.kernels.carriers import Fp8Tensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.product import Product
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class OutputRows:
    """One checkpoint matrix of a merged layer: all its output rows and the ones this rank holds."""

    name: str
    total: int
    held: range


class ColumnParallelLinear:
    """Several matrices with one input, stacked: this rank's rows of each, in the order given."""

    def __init__(self, in_features: int, parts: Sequence[OutputRows], *, bias: bool, setup: LayerSetup) -> None:
        num_rows = sum(len(part.held) for part in parts)
        self.parts = tuple(parts)
        self._product = Product(num_rows, in_features, setup)
        self.bias = setup.empty(num_rows) if bias else None

    @property
    def weight(self) -> Tensor | None:
        """All rows; None where they are put into another form when they have been loaded.

        Shapes: [N of this rank, K].
        """
        return self._product.weight if self._product.stays_plain else None

    @property
    def input_format(self) -> QuantFormat | None:
        """What x is quantised to; None: it is taken as it is."""
        return self._product.input_format

    def __call__(self, x: Tensor | Fp8Tensor) -> Tensor:
        """This rank's outputs; x may be in `input_format` already.

        Shapes: x [T, K] -> [T, N of this rank].
        Ranks: local.
        """
        return self._product(x, self.bias)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`{prefix}{part}.weight` and `.bias` of every part."""
        in_features = self._product.shape[1]
        start = 0
        for part in self.parts:
            rows = slice(start, start + len(part.held))
            start = rows.stop
            name = f"{prefix}{part.name}"
            yield WeightSlot(
                f"{name}.weight", (part.total, in_features), (part.held, range(in_features)), self._product.weight[rows]
            )
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (part.total,), (part.held,), self.bias[rows])


class RowParallelLinear:
    """One matrix of which this rank holds the input columns `held`; whoever calls it sums the parts (layers/rows).

    The bias is added once: by tp rank 0, to its partial result. All ranks hold it, so that all load the same tensors.
    """

    def __init__(
        self, total: int, held: range, out_features: int, *, bias: bool, setup: LayerSetup, adds: bool = False
    ) -> None:
        """`adds`: it is called with something to add to its output."""
        self.total = total
        self.held = held
        self._product = Product(out_features, len(held), setup, adds=adds)
        self.bias = setup.empty(out_features) if bias else None
        self._adds_bias = setup.tp.rank == 0

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """This rank's part of the output, rounded, + `added`: the sum over the ranks is the whole.

        Shapes: x [T, K of this rank], added [T, N] -> [T, N].
        Ranks: local.
        """
        return self._product(x, self.bias if self._adds_bias else None, added)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`{prefix}weight` and `{prefix}bias`."""
        out_features = self._product.shape[0]
        whole = (range(out_features), self.held)
        yield WeightSlot(f"{prefix}weight", (out_features, self.total), whole, self._product.weight)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}bias", (out_features,), (range(out_features),), self.bias)
