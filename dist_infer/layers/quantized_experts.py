"""Experts whose weights are quantised when they have been loaded. E experts held, D model, I intermediate channels."""

from dataclasses import dataclass, replace

from torch import Tensor

from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import quantized_experts as op
from dist_infer.kernels.carriers import Fp8Tensor, QuantizedTensor
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.quantize import QuantizeFunction
from dist_infer.kernels.quantized_experts import QuantizedExpertsFunction
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.layers.quantized import empty_weight
from dist_infer.layers.setup import LayerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertQuantizer:
    """The libraries that quantise the weights of experts and compute with them; chosen when the layer is built."""

    weight_format: WeightFormat
    quantize: Library[QuantizeFunction]
    compute: Library[QuantizedExpertsFunction]

    @classmethod
    def choose(cls, num_experts: int, width: int, inner: int, setup: LayerSetup) -> "ExpertQuantizer | None":
        """None where experts of this size keep their weights, which `on_choice` is told.

        Errors: UsageError for a kernel order that names no library.
        """
        weight_format = setup.weight_format
        if weight_format is None or not num_experts:
            return None
        reason = op.misfit(weight_format, width, inner)
        if reason is not None:
            setup.on_choice(f"quantized_experts: none, weights stay as they are ({reason})")
            return None
        sizes = op.geometry_of(weight_format, experts=num_experts, width=width, intermediate=inner)
        return cls(
            weight_format=weight_format,
            quantize=setup.choose("quantize", quantize_op.LIBRARIES, width=width),
            compute=setup.choose("quantized_experts", op.LIBRARIES[weight_format], **sizes),
        )

    def __call__(self, gate_up: Tensor, down: Tensor) -> "QuantizedExperts":
        """The weights in this format; as they are, they aren't needed any more.

        Shapes: gate_up [E, 2 * I, D], down [E, D, I].
        """
        return QuantizedExperts(self._stacked(gate_up), self._stacked(down), self.compute)

    def _stacked(self, weight: Tensor) -> QuantizedTensor:
        """One matrix of all experts' rows, quantised expert by expert: little memory is needed in between."""
        num_experts, rows, width = weight.shape
        out = empty_weight(weight.view(num_experts * rows, width), self.weight_format)
        for idx in range(num_experts):
            narrow = weight[idx] if weight.dtype in quantize_op.INPUT_DTYPES else weight[idx].float()
            self.quantize.function(narrow, _rows_of(out, idx * rows, rows))
        return out


class QuantizedExperts:
    """The quantised weights of all experts that a rank holds."""

    def __init__(
        self, gate_up: QuantizedTensor, down: QuantizedTensor, library: Library[QuantizedExpertsFunction]
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._library = library

    @property
    def num_bytes(self) -> int:
        """Of data and scales."""
        return sum(weight.data.nbytes + weight.scales.nbytes for weight in (self._gate_up, self._down))

    def __call__(self, x: Tensor | Fp8Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts.

        Shapes: x [R, D], expert_ids and weights [R, K] -> [R, D].
        """
        return op.quantized_experts(x, expert_ids, weights, self._gate_up, self._down, library=self._library)


def _rows_of(matrix: QuantizedTensor, first: int, rows: int) -> QuantizedTensor:
    """A part of a matrix with linear scales; with FP8 blocks it begins and ends between them."""
    width = matrix.shape[1]
    data = matrix.data[first : first + rows]
    if isinstance(matrix, Fp8Tensor):
        scales = matrix.scales[first // 128 : (first + rows) // 128]
        return replace(matrix, data=data, scales=scales, shape=(rows, width))
    blocks = width // matrix.BLOCK
    scales = matrix.scales[first * blocks : (first + rows) * blocks]
    return replace(matrix, data=data, scales=scales, shape=(rows, width))
