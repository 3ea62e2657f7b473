"""RMSNorm with the residual addition before it."""

from collections.abc import Iterator

from torch import Tensor

from dist_infer.kernels import rms_norm as op
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


class RmsNorm:
    """Replicated on all ranks of the group: every rank computes the same bits."""

    def __init__(self, hidden_size: int, eps: float, setup: LayerSetup) -> None:
        self.eps = eps
        self.weight = setup.empty(hidden_size)
        self._library = setup.choose("rms_norm", op.LIBRARIES, hidden=hidden_size)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual).

        Shapes: x, residual and results [T, D].
        Ranks: local.
        """
        return op.rms_norm(x, self.weight, self.eps, residual, library=self._library)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """The tensor `{prefix}weight`."""
        hidden_size = len(self.weight)
        yield WeightSlot(f"{prefix}weight", (hidden_size,), (range(hidden_size),), self.weight)
