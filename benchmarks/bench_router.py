"""Logits of a router on a GPU: bfloat16 activations, float32 weights.

    python -m benchmarks.bench_router [--peers FOLDER]

Peers: torch, which widens the activations first, and vLLM's kernel (see vllm_wheel). The floor counts weights,
activations and logits once. Rows that are "hot" find the weights in the cache: all calls have the same.
"""

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Row, Run, compare, floor_us, write_results
from benchmarks.vllm_wheel import compiled_ops, parse_peers, peer_or_reason
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.reference.router_gemm import router_gemm as torch_router_gemm
from dist_infer.kernels.router_gemm import LIBRARIES

TOKENS = (1, 4, 8, 16, 32, 64, 128)
SIZES = ((2048, 128), (6144, 128), (7168, 256))  # hidden, experts
NUM_SAMPLES = 20

Inputs = tuple[Tensor, Tensor]


def vllm_router(inputs: Inputs, folder: Path | None) -> Run[Inputs]:
    """vLLM's kernel, after a call that tells whether it takes such inputs."""
    ops: Any = compiled_ops(folder, "_C_stable_libtorch.abi3.so", "_C")

    def run(inputs: Inputs) -> Sequence[Tensor]:
        x, weight = inputs
        out = torch.empty(len(x), len(weight), device=x.device)
        ops.fp32_router_gemm(out, x, weight)
        return [out]

    run(inputs)
    torch.cuda.synchronize()
    return run


def measure(
    tokens: int, width: int, num_experts: int, device: torch.device, *, hot: bool, folder: Path | None = None
) -> Row:
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

    candidates: dict[str, Run[Inputs]] = {"ours": ours, "torch": peer}
    other = peer_or_reason(lambda: vllm_router(make(0), folder))
    if not isinstance(other, str):
        candidates["vLLM fp32_router_gemm"] = other
    num_bytes = num_experts * width * 4 + tokens * width * 2 + tokens * num_experts * 4
    found = compare(
        candidates,
        make,
        device=device,
        bytes_per_call=num_bytes,
        num_samples=NUM_SAMPLES,
    )
    return Row(
        case=f"{width}x{num_experts} tokens={tokens} {'hot' if hot else 'rotated'}",
        ours_us=found["ours"].median_us,
        library=library.name,
        floor_us=floor_us(read_bytes=num_bytes),
        peers={name: found[name].median_us for name in candidates if name != "ours"},
        not_run={"vLLM fp32_router_gemm": other} if isinstance(other, str) else {},
    )


def main() -> int:
    """Measures and writes the results."""
    device = torch.device("cuda")
    folder = parse_peers(__doc__, sys.argv[1:]).peers
    rows = []
    for width, num_experts in SIZES:
        for tokens, hot in product(TOKENS, (False, True)):
            row = measure(tokens, width, num_experts, device, hot=hot, folder=folder)
            rows.append(row)
            peers = ", ".join(f"{name} {us:.2f}" for name, us in row.peers.items())
            unrun = "".join(f"; {name} not run: {why}" for name, why in row.not_run.items())
            sys.stdout.write(f"{row.case}: {row.ours_us:.2f} us, floor {row.floor_us:.2f}, {peers}{unrun}\n")
    write_results("bench_router", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
