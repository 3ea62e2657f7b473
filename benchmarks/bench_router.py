"""Logits of a router on a GPU: bfloat16 activations, float32 weights.

    python -m benchmarks.bench_router

Peer: torch, which widens the activations first. The floor counts weights, activations and logits once. Rows that are
"hot" find the weights in the cache: all calls have the same.
"""

import sys
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from benchmarks.timing import Row, compare, floor_us, write_results
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.reference.router_gemm import router_gemm as torch_router_gemm
from dist_infer.kernels.router_gemm import LIBRARIES

TOKENS = (1, 4, 8, 16, 32, 64, 128)
SIZES = ((2048, 128), (6144, 128), (7168, 256))  # hidden, experts
NUM_SAMPLES = 20

Inputs = tuple[Tensor, Tensor]


def measure(tokens: int, width: int, num_experts: int, device: torch.device, *, hot: bool) -> Row:
    """One row of the results."""
    shared = torch.randn(num_experts, width, device=device)

    def make(_: int) -> Inputs:
        x = torch.randn(tokens, width, device=device).to(torch.bfloat16)
        return x, shared if hot else torch.randn(num_experts, width, device=device)

    library = resolve("router_gemm", LIBRARIES, Target(device=device, dtype=torch.bfloat16)).pick()

    def ours(inputs: Inputs) -> Sequence[Tensor]:
        return [library.function(*inputs)]

    def peer(inputs: Inputs) -> Sequence[Tensor]:
        return [torch_router_gemm(*inputs)]

    num_bytes = num_experts * width * 4 + tokens * width * 2 + tokens * num_experts * 4
    found = compare(
        {"ours": ours, "torch": peer},
        make,
        device=device,
        bytes_per_call=num_bytes,
        num_samples=NUM_SAMPLES,
    )
    return Row(
        case=f"tokens={tokens} hidden={width} experts={num_experts}{' hot' if hot else ''}",
        ours_us=found["ours"].median_us,
        library=library.name,
        floor_us=floor_us(read_bytes=num_bytes),
        peers={"torch": found["torch"].median_us},
    )


def main() -> int:
    """Measures and writes the results."""
    device = torch.device("cuda")
    rows = []
    for width, num_experts in SIZES:
        for tokens, hot in product(TOKENS, (False, True)):
            row = measure(tokens, width, num_experts, device, hot=hot)
            rows.append(row)
            sys.stdout.write(
                f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, torch {row.peers['torch']:.2f}\n"
            )
    write_results("bench_router", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
