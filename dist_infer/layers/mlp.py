"""The dense gated MLP. T tokens, D hidden, I intermediate channels held."""

from collections.abc import Iterator

from torch import Tensor

from dist_infer.comm.mesh import split_range
from dist_infer.config import ModelConfig
from dist_infer.kernels import silu_mul as op
from dist_infer.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


class GatedMlp:
    """down(silu(gate(x)) * up(x)), the intermediate channels split over the group."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        total = config.intermediate_size
        held = split_range(total, setup.tp.size, setup.tp.rank)
        self.gate_up = ColumnParallelLinear(
            config.hidden_size,
            (OutputRows("gate_proj", total, held), OutputRows("up_proj", total, held)),
            bias=config.mlp_bias,
            setup=setup,
        )
        self.down = RowParallelLinear(total, held, config.hidden_size, bias=config.mlp_bias, setup=setup)
        self._library = setup.choose("silu_mul", op.LIBRARIES, intermediate=len(held))

    def __call__(self, hidden: Tensor) -> Tensor:
        """The MLP output, summed over the group.

        Shapes: hidden [T, D] -> [T, D].
        Ranks: collective over tp.
        """
        return self.down(op.silu_mul(self.gate_up(hidden), library=self._library))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`gate_proj`, `up_proj` and `down_proj` under `prefix`."""
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(f"{prefix}down_proj.")
