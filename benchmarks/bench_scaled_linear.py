"""Products with quantised weights on a GPU.

    python -m benchmarks.bench_scaled_linear

MXFP8 and NVFP4 weights are prepared before, as when a model is loaded. Bounds: the product of cuBLAS in bfloat16 on
the dequantised weight, which reads two to four times the bytes, and for FP8 the same product with `use_fast_accum`,
which rounds partial sums. The floor counts each byte once, or the operations at the rate of the operands' format,
whichever takes longer.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.timing import Row, compare, floor_us, write_results
from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.scaled_linear import LIBRARIES, WeightFormat

SHAPES = ((18432, 7168), (7168, 18432))  # outputs, inputs
FEW_TOKENS = (1, 4, 16, 32, 64)
MANY_TOKENS = (4096,)
NUM_SAMPLES = 10

# x, the weight as the library takes it, x in bfloat16
Operands = tuple[Tensor | Fp8Tensor, QuantizedTensor | PreparedWeight, Tensor]


def filled(rows: int, width: int, scaling: Fp8Scaling | None, weight_format: WeightFormat) -> QuantizedTensor:
    """Random data with scales near 1."""
    device = torch.device("cuda")
    codes = torch.randint(0, 120, (rows, width), dtype=torch.uint8, device=device)
    codes += torch.randint(0, 2, (rows, width), dtype=torch.uint8, device=device) * 128
    if weight_format is WeightFormat.NVFP4:
        scales = torch.randint(40, 60, (rows * width // 16,), dtype=torch.uint8, device=device)
        one = torch.ones(1, device=device)
        data = codes[:, ::2].contiguous()
        return Nvfp4Tensor(data=data, scales=scales, layout=ScaleLayout.LINEAR, shape=(rows, width), global_scale=one)
    values = codes.view(torch.float8_e4m3fn)
    if scaling is None:
        scales = torch.randint(125, 129, (rows * width // 32,), dtype=torch.uint8, device=device)
        return Mxfp8Tensor(data=values, scales=scales, layout=ScaleLayout.LINEAR, shape=(rows, width))
    wide = torch.rand(scaling.scales_shape(rows, width), device=device) + 0.5
    return Fp8Tensor(data=values, scales=wide, scaling=scaling, shape=(rows, width))


def weight_of(weight_format: WeightFormat, outputs: int, inputs: int) -> QuantizedTensor:
    scaling = {WeightFormat.FP8: Fp8Scaling.TENSOR, WeightFormat.FP8_BLOCK: Fp8Scaling.BLOCKS_128X128}
    return filled(outputs, inputs, scaling.get(weight_format), weight_format)


def input_of(weight_format: WeightFormat, plain: Tensor) -> Tensor | Fp8Tensor:
    """Where inputs are quantised, other values of the same shape."""
    scaling = {WeightFormat.FP8: Fp8Scaling.TENSOR, WeightFormat.FP8_BLOCK: Fp8Scaling.BLOCKS_1X128}
    if weight_format not in scaling:
        return plain
    x = filled(plain.shape[0], plain.shape[1], scaling[weight_format], weight_format)
    if not isinstance(x, Fp8Tensor):
        raise TypeError(f"{weight_format.value} takes an FP8 input")
    return x


class Products:
    """The products of one weight's shape and format with any number of tokens; the weights are made once."""

    def __init__(self, weight_format: WeightFormat, outputs: int, inputs: int) -> None:
        self._format, self._outputs, self._inputs = weight_format, outputs, inputs
        target = Target(
            device=torch.device("cuda"), dtype=torch.bfloat16, geometry={"inputs": inputs, "outputs": outputs}
        )
        self._library = resolve("scaled_linear", LIBRARIES[weight_format], target).pick()
        self._unquantized = torch.randn(outputs, inputs, device="cuda").to(torch.bfloat16)
        self._weights: list[QuantizedTensor | PreparedWeight] = []
        self._weight_bytes = 0

    def _make(self, tokens: int, idx: int) -> Operands:
        while idx >= len(self._weights):
            weight = weight_of(self._format, self._outputs, self._inputs)
            self._weight_bytes = weight.data.nbytes + weight.scales.nbytes
            prepare = self._library.prepare
            self._weights.append(weight if prepare is None else prepare(weight))
        plain = torch.randn(tokens, self._inputs, device="cuda").to(torch.bfloat16)
        return input_of(self._format, plain), self._weights[idx], plain

    def measure(self, tokens: int) -> Row:
        candidates: dict[str, Callable[[Operands], Sequence[Tensor]]] = {
            "ours": lambda operands: [self._library.function(operands[0], operands[1], None, torch.bfloat16)],
            "bf16 cuBLAS": lambda operands: [operands[2] @ self._unquantized.t()],
        }
        if self._format is WeightFormat.FP8:
            candidates["fast accumulation"] = fast_accumulation
        x, _, plain = self._make(tokens, 0)
        input_bytes = x.data.nbytes + x.scales.nbytes if isinstance(x, Fp8Tensor) else plain.nbytes
        num_bytes = input_bytes + self._weight_bytes + tokens * self._outputs * 2
        found = compare(
            candidates,
            lambda idx: self._make(tokens, idx),
            device=torch.device("cuda"),
            bytes_per_call=num_bytes,
            num_samples=NUM_SAMPLES,
        )
        return Row(
            case=f"{self._format.value} tokens={tokens} {self._inputs}->{self._outputs}",
            ours_us=found["ours"].median_us,
            library=self._library.name,
            floor_us=floor_us(
                read_bytes=num_bytes,
                flops=2 * tokens * self._outputs * self._inputs,
                number_format="fp8" if isinstance(x, Fp8Tensor) else "bf16",
            ),
            bounds={name: value.median_us for name, value in found.items() if name != "ours"},
        )


def fast_accumulation(operands: Operands) -> Sequence[Tensor]:
    x, weight, _ = operands
    if not isinstance(x, Fp8Tensor) or not isinstance(weight, Fp8Tensor):
        raise TypeError("fast accumulation is that of FP8")
    scales = (x.scales.view(()), weight.scales.view(()))
    return [torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)]


def main() -> int:
    """Measures and writes the results."""
    rows = []
    for weight_format in WeightFormat:
        for outputs, inputs in SHAPES:
            products = Products(weight_format, outputs, inputs)
            for tokens in (*FEW_TOKENS, *MANY_TOKENS):
                rows.append(products.measure(tokens))
                row = rows[-1]
                sys.stdout.write(f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, {row.bounds}\n")
            del products
    write_results("bench_scaled_linear", rows, device=torch.device("cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
