"""Matrix products cut over the tensor-parallel ranks. T tokens, K inputs, N outputs.

A column-parallel layer gives each rank some outputs and needs no exchange; a row-parallel one gives each rank some
inputs, and the results must be summed. Parts may be uneven, down to nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dist_infer.kernels import linear as op
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
        self.weight = setup.empty(num_rows, in_features)
        self.bias = setup.empty(num_rows) if bias else None
        self._library = setup.choose("linear", op.LIBRARIES, inputs=in_features, outputs=num_rows)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's outputs.

        Shapes: x [T, K] -> [T, N of this rank].
        Ranks: local.
        """
        return op.linear(x, self.weight, self.bias, library=self._library)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`{prefix}{part}.weight` and `.bias` of every part."""
        in_features = self.weight.shape[1]
        start = 0
        for part in self.parts:
            rows = slice(start, start + len(part.held))
            start = rows.stop
            name = f"{prefix}{part.name}"
            yield WeightSlot(
                f"{name}.weight", (part.total, in_features), (part.held, range(in_features)), self.weight[rows]
            )
            if self.bias is not None:
                yield WeightSlot(f"{name}.bias", (part.total,), (part.held,), self.bias[rows])


class RowParallelLinear:
    """One matrix of which this rank holds the input columns `held`; whoever calls it sums the parts (layers/rows).

    The bias is added once: by tp rank 0, to its partial result. All ranks hold it, so that all load the same tensors.
    """

    def __init__(self, total: int, held: range, out_features: int, *, bias: bool, setup: LayerSetup) -> None:
        self.total = total
        self.held = held
        self.weight = setup.empty(out_features, len(held))
        self.bias = setup.empty(out_features) if bias else None
        self._adds_bias = setup.tp.rank == 0
        self._library = setup.choose("linear", op.LIBRARIES, inputs=len(held), outputs=out_features)

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's part of the output: the sum over the ranks is the whole.

        Shapes: x [T, K of this rank] -> [T, N].
        Ranks: local.
        """
        bias = self.bias if self._adds_bias else None
        return op.linear(x, self.weight, bias, library=self._library)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`{prefix}weight` and `{prefix}bias`."""
        out_features = self.weight.shape[0]
        yield WeightSlot(f"{prefix}weight", (out_features, self.total), (range(out_features), self.held), self.weight)
        if self.bias is not None:
            yield WeightSlot(f"{prefix}bias", (out_features,), (range(out_features),), self.bias)
