"""Memory of the exchange with the experts against the formula in docs/structure.md."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from dist_infer.comm.collectives import TorchCollectives
from dist_infer.comm.expert import open_expert_exchange
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.wire import GlooWire
from dist_infer.kernels.moe_experts import LIBRARIES, moe_experts
from tests.comm.thread_ranks import run_ranks
from tests.peak_memory import peak_bytes
from tests.source_tree import ROOT

CPU = torch.device("cpu")
FORMULA = "n D e + G (D (e + w) + 32 K) + P D (e + u / K)"
WIDTH, INNER, NUM_EXPERTS, TOP_K, NUM_ROWS = 512, 32, 8, 4, 512


def expected_bytes(*, own: int, rows: int, pairs: int, dtype: torch.dtype) -> float:
    """The formula, as Python."""
    D, K, e, w = WIDTH, TOP_K, dtype.itemsize, max(4, dtype.itemsize)
    u = e if e == w else e + w
    return own * D * e + rows * (D * (e + w) + 32 * K) + pairs * D * (e + u / K)


def measure(rank: int, store: HashStore, dtype: torch.dtype, limit: int | None) -> tuple[int, float]:
    """(measured, expected) bytes of one of two ranks."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=30)
    world = TorchCollectives(GlooWire(dist.ProcessGroupGloo(store, rank, 2, options), CPU), axis="world")
    mesh = Mesh.create(world=2, rank=rank, dp=2)
    exchange = open_expert_exchange(mesh, world, CPU, num_experts=NUM_EXPERTS, top_k=TOP_K)
    generator = torch.Generator().manual_seed(rank)
    held = NUM_EXPERTS // 2
    gate_up = torch.randn(held, 2 * INNER, WIDTH, generator=generator).to(dtype)
    down = torch.randn(held, WIDTH, INNER, generator=generator).to(dtype)
    x = torch.randn(NUM_ROWS, WIDTH, generator=generator).to(dtype)
    ids = torch.rand(NUM_ROWS, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K].int()
    weights = torch.rand(NUM_ROWS, TOP_K, generator=generator)
    plan = exchange.plan([NUM_ROWS] * 2, limit)
    most: list[tuple[int, int]] = []

    def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        most.append((int((ids >= 0).sum()), len(x)))
        return moe_experts(x, ids, weights, gate_up, down, library=LIBRARIES[-1])

    measured = peak_bytes(lambda: exchange.run(x, ids, weights, experts, plan))
    pairs, rows = max(most)
    earlier = NUM_ROWS - len(plan.own(rank, plan.num_chunks - 1)[0])  # results that wait for the last chunk
    return measured, expected_bytes(own=earlier, rows=rows, pairs=pairs, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_peak_is_the_formula_at_two_limits(dtype: torch.dtype) -> None:
    peaks = []
    for limit in (128, None):
        store = HashStore()
        results = run_ranks(2, lambda rank, _, store=store, limit=limit: measure(rank, store, dtype, limit))  # type: ignore[misc]
        for measured, expected in results:
            assert abs(measured - expected) < 0.1 * measured, f"{measured} bytes at limit {limit}, not {expected:.0f}"
        peaks.append(results[0][0])
    assert peaks[0] < peaks[1] / 3, "the limit bounds nothing"


def test_formula_stands_in_the_docs() -> None:
    assert FORMULA in re.sub(r"\s+", " ", (ROOT / "docs" / "structure.md").read_text())
