"""Residual addition and RMSNorm in one launch, decode and prefill. Needs a GPU.

    python -m benchmarks.bench_rms_norm

bf16. The peer is plain torch through torch.compile, for each shape anew. The bound copies as many bytes. Every result
is checked against float64.
"""

import sys
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.reference.rms_norm import rms_norm as reference_rms_norm
from dist_infer.kernels.rms_norm import LIBRARIES, RmsNormFunction, rms_norm

Inputs: TypeAlias = tuple[Tensor, Tensor]  # x, residual

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
EPS = 1e-5
CASES = [(tokens, hidden) for hidden in (4096, 8192) for tokens in (1, 4096)]
MAX_ERROR = 3e-3  # of the norm: one rounding


def measure(num_tokens: int, hidden: int) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    name = f"bf16 tokens={num_tokens} hidden={hidden}"
    library = resolve("rms_norm", LIBRARIES, Target(device=DEVICE, dtype=DTYPE)).pick()
    weight = torch.rand(hidden, device=DEVICE).add(0.5).to(DTYPE)
    compiled: RmsNormFunction = torch.compile(reference_rms_norm, dynamic=False)

    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        x, residual = (torch.randn(num_tokens, hidden, device=DEVICE, generator=generator).to(DTYPE) for _ in range(2))
        return x, residual

    runs: dict[str, Run[Inputs]] = {
        "ours": lambda inputs: rms_norm(inputs[0], weight, EPS, inputs[1], library=library),
        "torch.compile": lambda inputs: compiled(inputs[0], weight, EPS, inputs[1]),
    }
    for candidate, run in runs.items():
        check(f"{name} {candidate}", run(make_inputs(0))[0], make_inputs(0), weight)
    num_bytes = 4 * num_tokens * hidden * DTYPE.itemsize
    found = compare(runs, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=20)
    copies: dict[str, Run[Inputs]] = {"copies": lambda inputs: [inputs[0].clone(), inputs[1].clone()]}
    copied = compare(copies, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=20)
    return Row(
        case=name,
        ours_us=found["ours"].median_us,
        library=library.name,
        floor_us=floor_us(copy_bytes=num_bytes),
        peers={"torch.compile": found["torch.compile"].median_us},
        bounds={"two copies": copied["copies"].median_us},
    )


def check(name: str, out: Tensor, inputs: Inputs, weight: Tensor) -> None:
    """Against the formula in float64."""
    total = (inputs[0] + inputs[1]).double()
    expected = total / (total.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    error = ((out.double() - expected).norm() / expected.norm()).item()
    if not error < MAX_ERROR:
        raise BenchmarkError(f"{name}: relative error {error:.3g}")


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError for a wrong result.
    """
    rows = []
    for num_tokens, hidden in CASES:
        row = measure(num_tokens, hidden)
        rows.append(row)
        sys.stdout.write(f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, {row.peers} {row.bounds}\n")
    write_results("bench_rms_norm", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
