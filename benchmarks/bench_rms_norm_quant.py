"""Residual addition, RMSNorm and quantisation in one launch on a GPU.

    python -m benchmarks.bench_rms_norm_quant

Peers: the same as two launches of ours (norm, then quantise). Bound: the norm alone, without quantisation. The floor
counts each byte of the inputs, the residual, data and scales once, as a copy; gamma stays in the cache.
"""

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.bench_quantize import scale_of, written
from benchmarks.timing import Row, compare, floor_us, write_results
from dist_infer.kernels import quantize, rms_norm, rms_norm_quant
from dist_infer.kernels.carriers import QuantizedTensor
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.quantize import QuantFormat

SIZES = ((1, 6144), (16, 6144), (128, 6144), (129, 6144), (1024, 6144), (4096, 6144), (1, 7168), (4096, 7168))
EPS = 1e-5
NUM_SAMPLES = 9

Inputs = tuple[Tensor, Tensor, Tensor, QuantizedTensor]  # x, gamma, residual, output


def cases() -> Iterator[tuple[QuantFormat, bool, int, int]]:
    """norm_out is stored too (`with_norm`) for one format: it adds the same bytes to any."""
    for quant_format in QuantFormat:
        for with_norm in (False, True) if quant_format is QuantFormat.MXFP8 else (False,):
            yield from ((quant_format, with_norm, *size) for size in SIZES)


def measure(quant_format: QuantFormat, with_norm: bool, tokens: int, hidden: int, device: torch.device) -> Row:
    def make(_: int) -> Inputs:
        x, residual = (torch.randn(tokens, hidden, device=device).to(torch.bfloat16) for _ in range(2))
        gamma = torch.rand(hidden, device=device).to(torch.bfloat16)
        return (
            x,
            gamma,
            residual,
            quant_format.empty(tokens, hidden, device=device, scale=scale_of(quant_format, device)),
        )

    x, _, residual, out = make(0)
    target = Target(device=device, dtype=x.dtype)
    fused = resolve("rms_norm_quant", rms_norm_quant.LIBRARIES, target).pick()
    norm = resolve("rms_norm", rms_norm.LIBRARIES, target).pick()
    quantizer = resolve("quantize", quantize.LIBRARIES, target).pick()

    def ours(inputs: Inputs) -> Sequence[Tensor]:
        x, gamma, residual, out = inputs
        normed, total = fused.function(x, gamma, EPS, residual, out, with_norm)
        return [*([] if normed is None else [normed]), total, *written(out)]

    def norm_alone(inputs: Inputs) -> Sequence[Tensor]:
        return list(norm.function(inputs[0], inputs[1], EPS, inputs[2]))

    def one_by_one(inputs: Inputs) -> Sequence[Tensor]:
        normed, total = norm.function(inputs[0], inputs[1], EPS, inputs[2])
        quantizer.function(normed, inputs[3])
        return [normed, total, *written(inputs[3])]

    candidates: dict[str, Callable[[Inputs], Sequence[Tensor]]] = {
        "ours": ours,
        "norm, then quantise": one_by_one,
        "norm alone": norm_alone,
    }
    num_bytes = sum(part.nbytes for part in (x, residual, x, *([x] if with_norm else []), *written(out)))
    found = compare(candidates, make, device=device, bytes_per_call=num_bytes, num_samples=NUM_SAMPLES)
    stored = " with norm" if with_norm else ""
    return Row(
        case=f"{quant_format.value}{stored} tokens={tokens} hidden={hidden}",
        ours_us=found["ours"].median_us,
        library=fused.name,
        floor_us=floor_us(copy_bytes=num_bytes),
        peers={"norm, then quantise": found["norm, then quantise"].median_us},
        bounds={"norm alone": found["norm alone"].median_us},
    )


def main() -> int:
    """Measures and writes the results."""
    device = torch.device("cuda")
    rows = []
    for case in cases():
        rows.append(measure(*case, device))
        row = rows[-1]
        sys.stdout.write(f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, {row.peers} {row.bounds}\n")
    write_results("bench_rms_norm_quant", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
