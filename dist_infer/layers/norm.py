"""RMSNorm with the residual addition before it."""

from collections.abc import Iterator

from torch import Tensor

from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import rms_norm as op
from dist_infer.kernels import rms_norm_quant as quant_op
from dist_infer.kernels.carriers import Fp8Tensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.quantized import as_fp8, quantize_input
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


class InputNorm(RmsNorm):
    """RMSNorm for one consumer, which is given the number format that it would quantise its input to.

    The bytes are those that the consumer would make. `gives` is None where it takes the norm as it is: it wants no
    other format, or it is not settled that one launch makes the same bytes as two.
    """

    def __init__(self, hidden_size: int, eps: float, setup: LayerSetup, wanted: QuantFormat | None) -> None:
        super().__init__(hidden_size, eps, setup)
        self.gives: QuantFormat | None = None
        if wanted is None:
            return
        self._quantize = setup.choose("quantize", quantize_op.LIBRARIES, width=hidden_size)
        self._fused = setup.choose("rms_norm_quant", quant_op.LIBRARIES, hidden=hidden_size)
        if setup.dtype not in quantize_op.INPUT_DTYPES:
            setup.on_choice(f"norms of {hidden_size} leave {wanted.value} to their consumers: they are {setup.dtype}")
        elif not self._fused.name == self._library.name == self._quantize.name:
            names = f"{self._fused.name}, {self._library.name}, {self._quantize.name}"
            setup.on_choice(f"norms of {hidden_size} leave {wanted.value} to their consumers: libraries {names}")
        else:
            self.gives = wanted

    def quantized(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor | Fp8Tensor, Tensor]:
        """(norm of x + residual as the consumer takes it, x + residual), by one launch.

        Shapes: x, residual and results [T, D].
        Ranks: local.
        """
        if self.gives is None:
            return self(x, residual)
        _, total, out = quant_op.rms_norm_quant(
            x, self.weight, self.eps, residual, self.gives, with_norm=False, library=self._fused
        )
        return as_fp8(out), total

    def convert(self, normed: Tensor) -> Tensor | Fp8Tensor:
        """The norm, which another launch has made, as the consumer takes it.

        Shapes: [T, D].
        Ranks: local.
        """
        return normed if self.gives is None else quantize_input(normed, self.gives, self._quantize)
