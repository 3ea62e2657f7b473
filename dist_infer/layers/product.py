"""A rank's part of a matrix, and the product with it. T tokens, K inputs, N outputs."""

from torch import Tensor

from dist_infer.kernels import added_linear
from dist_infer.kernels import linear as op
from dist_infer.kernels.added_linear import AddedLinearFunction
from dist_infer.kernels.carriers import Fp8Tensor
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.quantized import INPUT_FORMATS, QuantizedWeight, Quantizer, misfit
from dist_infer.layers.setup import LayerSetup


class Product:
    """x W^T, of a weight in the dtype of the model: until it is loaded as it is, then as the library wants it.

    With `setup.weight_format` it is quantised instead, unless `stays_wide`. A weight that is `shared` with another
    layer remains as it is for that one; a library that wants it otherwise has a copy.
    """

    def __init__(
        self,
        outputs: int,
        inputs: int,
        setup: LayerSetup,
        *,
        shared: Tensor | None = None,
        stays_wide: bool = False,
        adds: bool = False,
    ) -> None:
        """`adds`: it is called with something to add to the product."""
        self.shape = (outputs, inputs)
        self.weight = setup.empty(outputs, inputs) if shared is None else shared
        self.quantized: QuantizedWeight | None = None
        self._is_shared = shared is not None
        self._library = setup.choose("linear", op.LIBRARIES, inputs=inputs, outputs=outputs)
        self._quantizer: Quantizer | None = None
        if setup.weight_format is not None and not stays_wide:
            reason = misfit(setup.weight_format, inputs, outputs)
            if reason is None:
                self._quantizer = Quantizer.choose(setup.weight_format, inputs, outputs, setup)
            else:
                setup.on_choice(f"a weight {inputs} -> {outputs} isn't quantised: {reason}")
        self._adding: Library[AddedLinearFunction] | None = None
        if adds and self.stays_plain:
            self._adding = setup.choose("added_linear", added_linear.LIBRARIES, inputs=inputs, outputs=outputs)
        if not self.stays_plain:
            setup.on_loaded.append(self._finish)

    @property
    def stays_plain(self) -> bool:
        """The weight is never put into another form."""
        return self._quantizer is None and self._library.prepare is None

    @property
    def input_format(self) -> QuantFormat | None:
        """What x is quantised to; None: it is taken as it is."""
        return None if self._quantizer is None else INPUT_FORMATS.get(self._quantizer.weight_format)

    def _finish(self) -> int:
        """The bytes that were freed; less than none where a shared weight has a copy now."""
        num_bytes = self.weight.nbytes
        if self._quantizer is not None:
            self.quantized = self._quantizer(self.weight)
            self.weight = self.weight.new_empty(0)
            return num_bytes - self.quantized.num_bytes
        if self._library.prepare is not None:
            self.weight = self._library.prepare(self.weight)
            return -num_bytes if self._is_shared else 0
        return 0

    def __call__(self, x: Tensor | Fp8Tensor, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
        """x W^T + bias, rounded, + added; x may be in `input_format` already.

        Shapes: x [T, K], bias [N], added [T, N] -> [T, N].
        Ranks: local.
        Errors: TypeError for a quantised x without a quantised weight.
        """
        if added is None:
            return self._multiply(x, bias)
        if self._adding is None or not isinstance(x, Tensor):
            return self._multiply(x, bias).add_(added)
        return added_linear.added_linear(x, self.weight, bias, added, library=self._adding)

    def _multiply(self, x: Tensor | Fp8Tensor, bias: Tensor | None) -> Tensor:
        if self.quantized is not None:
            return self.quantized(x, bias)
        if not isinstance(x, Tensor):
            raise TypeError("a weight that isn't quantised is multiplied by tensors")
        return op.linear(x, self.weight, bias, library=self._library)
