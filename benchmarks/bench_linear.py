"""Matrix products of few rows: the projections and the head of Llama-3-8B at small batches. Needs a GPU.

    python -m benchmarks.bench_linear

bf16. The peer is cuBLAS, with plain torch's activation behind it in the case that has one. A sample is a CUDA graph of
many calls, in which our kernels load weights before the one in front of them has ended, as in a decode step. Every
result is checked against float32.
"""

import sys
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.gated_linear import LIBRARIES as GATED_LIBRARIES
from dist_infer.kernels.gated_linear import gated_linear
from dist_infer.kernels.linear import LIBRARIES, linear
from dist_infer.kernels.reference.gated_linear import gated_linear as reference_gated_linear

Inputs: TypeAlias = tuple[Tensor, Tensor]  # x, weight

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
ROWS = (1, 8, 16)
SHAPES = {  # inputs, outputs
    "qkv": (4096, 6144),
    "o": (4096, 4096),
    "gate_up": (4096, 28672),
    "gate_up + silu_mul": (4096, 28672),
    "down": (14336, 4096),
    "head": (4096, 128256),
}
MAX_ERROR = 5e-3  # of the norm


def measure(name: str, num_rows: int) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    num_inputs, num_outputs = SHAPES[name]
    is_gated = name.endswith("silu_mul")
    target = Target(device=DEVICE, dtype=DTYPE)
    plain, gated = resolve("linear", LIBRARIES, target).pick(), resolve("gated_linear", GATED_LIBRARIES, target).pick()

    def ours(inputs: Inputs) -> list[Tensor]:
        x, weight = inputs
        return [gated_linear(x, weight, library=gated) if is_gated else linear(x, weight, library=plain)]

    def cublas(inputs: Inputs) -> list[Tensor]:
        x, weight = inputs
        return [reference_gated_linear(x, weight, None) if is_gated else torch.nn.functional.linear(x, weight)]

    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        x, weight = (
            torch.randn(rows, num_inputs, dtype=DTYPE, device=DEVICE, generator=generator)
            for rows in (num_rows, num_outputs)
        )
        return x, weight.mul_(num_inputs**-0.5)

    runs: dict[str, Run[Inputs]] = {"ours": ours, "cublas": cublas}
    x, weight = make_inputs(0)
    expected = x.float() @ weight.float().T
    if is_gated:
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    for candidate, run in runs.items():
        error = ((run((x, weight))[0].float() - expected).norm() / expected.norm()).item()
        if not error < MAX_ERROR:
            raise BenchmarkError(f"{name} rows={num_rows} {candidate}: relative error {error:.3g}")
    num_bytes = num_inputs * num_outputs * DTYPE.itemsize
    found = compare(runs, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=10)
    return Row(
        case=f"bf16 {name} rows={num_rows}",
        ours_us=found["ours"].median_us,
        library=(gated if is_gated else plain).name,
        floor_us=floor_us(read_bytes=num_bytes),
        peers={"cublas": found["cublas"].median_us},
    )


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError for a wrong result.
    """
    rows = []
    for name in SHAPES:
        for num_rows in ROWS:
            row = measure(name, num_rows)
            rows.append(row)
            share = 100 * (row.floor_us or 0) / row.ours_us
            sys.stdout.write(f"{row.case}: {row.ours_us:.1f} us, {share:.0f} % of floor, {row.peers}\n")
        torch.cuda.empty_cache()
    write_results("bench_linear", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
