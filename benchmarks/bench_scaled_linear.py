"""Products with quantised weights on a GPU.

    python -m benchmarks.bench_scaled_linear

Bounds: the product of cuBLAS in bfloat16 on the dequantised weight, which reads two to four times the bytes, and for
FP8 the same product with `use_fast_accum`, which rounds partial sums. The floor counts each byte once, or the
operations at the rate of the operands' format, whichever takes longer.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.timing import Row, compare, floor_us, write_results
from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.scaled_linear import LIBRARIES, WeightFormat

SHAPES = ((18432, 7168), (7168, 18432))  # outputs, inputs
FEW_TOKENS = (1, 16, 32, 64)
MANY_TOKENS = (4096,)
NUM_SAMPLES = 10

Inputs = tuple[Tensor | Fp8Tensor, QuantizedTensor, Tensor]  # x, weight, x in bfloat16


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


def make_inputs(weight_format: WeightFormat, tokens: int, outputs: int, inputs: int) -> Inputs:
    plain = torch.randn(tokens, inputs, device="cuda").to(torch.bfloat16)
    scalings = {
        WeightFormat.FP8: (Fp8Scaling.TENSOR, Fp8Scaling.TENSOR),
        WeightFormat.FP8_BLOCK: (Fp8Scaling.BLOCKS_1X128, Fp8Scaling.BLOCKS_128X128),
    }.get(weight_format)
    if scalings is None:
        return plain, filled(outputs, inputs, None, weight_format), plain
    x = filled(tokens, inputs, scalings[0], weight_format)
    if not isinstance(x, Fp8Tensor):
        raise TypeError(f"{weight_format.value} takes an FP8 input")
    return x, filled(outputs, inputs, scalings[1], weight_format), plain


def cases() -> Iterator[tuple[WeightFormat, int, int, int]]:
    for weight_format in WeightFormat:
        for outputs, inputs in SHAPES:
            yield from ((weight_format, tokens, outputs, inputs) for tokens in (*FEW_TOKENS, *MANY_TOKENS))


def measure(weight_format: WeightFormat, tokens: int, outputs: int, inputs: int) -> Row:
    device = torch.device("cuda")
    target = Target(device=device, dtype=torch.bfloat16, geometry={"inputs": inputs, "outputs": outputs})
    library = resolve("scaled_linear", LIBRARIES[weight_format], target).pick()
    x, weight, plain = make_inputs(weight_format, tokens, outputs, inputs)
    unquantized = torch.randn(outputs, inputs, device=device).to(torch.bfloat16)
    candidates: dict[str, Callable[[Inputs], Sequence[Tensor]]] = {
        "ours": lambda operands: [library.function(operands[0], operands[1], None, torch.bfloat16)],
        "bf16 cuBLAS": lambda operands: [operands[2] @ unquantized.t()],
    }
    if weight_format is WeightFormat.FP8:
        candidates["fast accumulation"] = fast_accumulation
    input_bytes = x.data.nbytes + x.scales.nbytes if isinstance(x, Fp8Tensor) else plain.nbytes
    num_bytes = input_bytes + weight.data.nbytes + weight.scales.nbytes + tokens * outputs * 2
    found = compare(
        candidates,
        lambda _: make_inputs(weight_format, tokens, outputs, inputs),
        device=device,
        bytes_per_call=num_bytes,
        num_samples=NUM_SAMPLES,
    )
    return Row(
        case=f"{weight_format.value} tokens={tokens} {inputs}->{outputs}",
        ours_us=found["ours"].median_us,
        library=library.name,
        floor_us=floor_us(
            read_bytes=num_bytes,
            flops=2 * tokens * outputs * inputs,
            number_format="fp8" if isinstance(x, Fp8Tensor) else "bf16",
        ),
        bounds={name: value.median_us for name, value in found.items() if name != "ours"},
    )


def fast_accumulation(operands: Inputs) -> Sequence[Tensor]:
    x, weight, _ = operands
    if not isinstance(x, Fp8Tensor):
        raise TypeError("fast accumulation is that of FP8")
    scales = (x.scales.view(()), weight.scales.view(()))
    return [torch._scaled_mm(x.data, weight.data.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)]


def main() -> int:
    """Measures and writes the results."""
    rows = []
    for case in cases():
        rows.append(measure(*case))
        row = rows[-1]
        sys.stdout.write(f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, {row.bounds}\n")
    write_results("bench_scaled_linear", rows, device=torch.device("cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
