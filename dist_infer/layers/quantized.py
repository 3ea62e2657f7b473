"""A weight that is quantised when it has been loaded, and the product with it. T tokens, K inputs, N outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import scaled_linear as op
from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.quantize import QuantFormat, QuantizeFunction
from dist_infer.kernels.scaled_linear import ScaledLinearFunction, WeightFormat
from dist_infer.kernels.staged_weight import StagedWeight
from dist_infer.layers.setup import LayerSetup

# What the inputs of a quantised weight are quantised to; with the other formats they are not
INPUT_FORMATS: Mapping[WeightFormat, QuantFormat] = MappingProxyType(
    {WeightFormat.FP8: QuantFormat.FP8_ROWS, WeightFormat.FP8_BLOCK: QuantFormat.FP8_BLOCK128}
)
_BLOCKS = {WeightFormat.FP8: 1, WeightFormat.FP8_BLOCK: 128, WeightFormat.MXFP8: 32, WeightFormat.NVFP4: 16}
_NVFP4_LARGEST = 448.0 * 6.0


def misfit(weight_format: WeightFormat, inputs: int, outputs: int) -> str | None:
    """Why a weight of this size stays as it is; None where it can be quantised."""
    if not inputs or not outputs:
        return "it is empty"
    block = _BLOCKS[weight_format]
    return f"{block} doesn't divide its {inputs} inputs" if inputs % block else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """The libraries that quantise a weight and its inputs, and multiply them; chosen when the layer is built."""

    weight_format: WeightFormat
    quantize: Library[QuantizeFunction]
    multiply: Library[ScaledLinearFunction]
    dtype: torch.dtype  # of the results

    @classmethod
    def choose(cls, weight_format: WeightFormat, inputs: int, outputs: int, setup: LayerSetup) -> "Quantizer":
        """Errors: UsageError for a kernel order that names no library."""
        return cls(
            weight_format=weight_format,
            quantize=setup.choose("quantize", quantize_op.LIBRARIES, width=inputs),
            multiply=setup.choose("scaled_linear", op.LIBRARIES[weight_format], inputs=inputs, outputs=outputs),
            dtype=setup.dtype,
        )

    def __call__(self, weight: Tensor) -> "QuantizedWeight":
        """The weight in this format; it isn't needed any more.

        Shapes: weight [N, K].
        """
        narrow = weight if weight.dtype in quantize_op.INPUT_DTYPES else weight.float()
        out = empty_weight(narrow, self.weight_format)
        self.quantize.function(narrow, out)
        prepare = self.multiply.prepare
        return QuantizedWeight(self, out if prepare is None else prepare(out))


class QuantizedWeight:
    """A quantised weight. With FP8 the inputs are quantised too, each token by itself, if they haven't been yet."""

    def __init__(self, quantizer: Quantizer, weight: QuantizedTensor | PreparedWeight) -> None:
        self.weight = weight
        self._quantizer = quantizer

    @property
    def num_bytes(self) -> int:
        """Of data and scales."""
        if isinstance(self.weight, StagedWeight):
            return self.weight.num_bytes
        return self.weight.data.nbytes + self.weight.scales.nbytes

    def __call__(self, x: Tensor | Fp8Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias.

        Shapes: x [T, K], bias [N] -> [T, N].
        Errors: ValueError for an x that is quantised to another format than this weight's inputs.
        """
        input_format = INPUT_FORMATS.get(self._quantizer.weight_format)
        operand = x
        if isinstance(x, Tensor) and input_format is not None:
            operand = quantize_input(x, input_format, self._quantizer.quantize)
        return op.scaled_linear(
            operand, self.weight, bias, out_dtype=self._quantizer.dtype, library=self._quantizer.multiply
        )


def quantize_input(x: Tensor, input_format: QuantFormat, library: Library[QuantizeFunction]) -> Fp8Tensor:
    """What a weight whose format is in `INPUT_FORMATS` is multiplied by.

    Shapes: x [T, K].
    """
    narrow = x if x.dtype in quantize_op.INPUT_DTYPES else x.float()
    return as_fp8(quantize_op.quantize(narrow.contiguous(), input_format, library=library))


def as_fp8(x: QuantizedTensor) -> Fp8Tensor:
    """Errors: TypeError for another format: all of `INPUT_FORMATS` are FP8."""
    if not isinstance(x, Fp8Tensor):
        raise TypeError(f"inputs are quantised to FP8, not to a {type(x).__name__}")
    return x


def empty_weight(weight: Tensor, weight_format: WeightFormat) -> QuantizedTensor:
    """For a kernel to fill with this weight, whose values settle the global scale of NVFP4.

    Shapes: weight [N, K].
    """
    rows, width = weight.shape
    if weight_format is WeightFormat.FP8:
        return Fp8Tensor.empty(rows, width, Fp8Scaling.ROWS, device=weight.device)
    if weight_format is WeightFormat.FP8_BLOCK:
        return Fp8Tensor.empty(rows, width, Fp8Scaling.BLOCKS_128X128, device=weight.device)
    if weight_format is WeightFormat.MXFP8:
        return Mxfp8Tensor.empty(rows, width, ScaleLayout.LINEAR, device=weight.device)
    amax = weight.abs().amax().float().view(1)
    scale = torch.where(amax > 0, _NVFP4_LARGEST / amax, 1.0)
    return Nvfp4Tensor.empty(rows, width, ScaleLayout.LINEAR, device=weight.device, global_scale=scale)
