"""The dense gated MLP. T tokens, D hidden, I intermediate channels held."""

from collections.abc import Iterator

from torch import Tensor

from dist_infer.comm.mesh import split_range
from dist_infer.kernels import gated_linear as op
from dist_infer.kernels import silu_mul as activation_op
from dist_infer.kernels.carriers import Fp8Tensor
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


class GatedMlp:
    """down(silu(gate(x)) * up(x)), the intermediate channels split over the group."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, setup: LayerSetup, *, bias: bool = False, adds: bool = False
    ) -> None:
        """`adds`: it is called with something to add to its output."""
        held = split_range(intermediate_size, setup.tp.size, setup.tp.rank)
        self.gate_up = ColumnParallelLinear(
            hidden_size,
            (OutputRows("gate_proj", intermediate_size, held), OutputRows("up_proj", intermediate_size, held)),
            bias=bias,
            setup=setup,
        )
        self.down = RowParallelLinear(intermediate_size, held, hidden_size, bias=bias, setup=setup, adds=adds)
        self._gated: Library[op.GatedLinearFunction] | None = None
        self._activation: Library[activation_op.SiluMulFunction] | None = None
        if self.gate_up.weight is not None:
            self._gated = setup.choose("gated_linear", op.LIBRARIES, inputs=hidden_size, intermediate=len(held))
        else:
            self._activation = setup.choose("silu_mul", activation_op.LIBRARIES, intermediate=len(held))

    @property
    def input_format(self) -> QuantFormat | None:
        """What `hidden` is quantised to; None: it is taken as it is."""
        return self.gate_up.input_format

    def __call__(self, hidden: Tensor | Fp8Tensor, added: Tensor | None = None) -> Tensor:
        """This rank's part of the MLP output, + `added`: the sum over the group is the whole.

        `hidden` may be quantised already.

        Shapes: hidden and added [T, D] -> [T, D].
        Ranks: local.
        """
        return self.down(self._activated(hidden), added)

    def _activated(self, hidden: Tensor | Fp8Tensor) -> Tensor:
        weight = self.gate_up.weight
        if self._gated is not None and weight is not None and isinstance(hidden, Tensor):
            return op.gated_linear(hidden, weight, self.gate_up.bias, library=self._gated)
        if self._activation is None:
            raise ValueError("the weight of gates and ups is in another form than when the layer was built")
        return activation_op.silu_mul(self.gate_up(hidden), library=self._activation)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`gate_proj`, `up_proj` and `down_proj` under `prefix`."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(f"{prefix}down_proj.")
