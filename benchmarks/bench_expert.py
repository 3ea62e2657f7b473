"""The ways to the experts and back between the ranks of one launch: gather and scatter beside all-to-all.

    python -m dist_infer.launch.mpirun -n 4 -- python -m benchmarks.bench_expert

Experts give back what they get, so only the exchange is measured; rows choose experts evenly. These rows tell
comm.expert from how many rows on, and from which part of the bytes saved on, all-to-all is the faster way. A sample is
the time of the slowest rank, the host's wait included.
"""

import statistics
import sys
import time

import torch
from torch import Tensor

from benchmarks.timing import Row, write_results
from dist_infer.comm import expert
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.expert import ScatteredRows
from dist_infer.comm.mesh import Mesh
from dist_infer.errors import ExitCode, UsageError
from dist_infer.launch.world import World, run_world

NUM_SAMPLES = 15
NUM_CALLS = 5
NUM_EXPERTS = 64
WIDTH = {"cpu": 1024, "cuda": 4096}
ROWS = {"cpu": (16, 128, 512, 2048), "cuda": (64, 512, 4096, 32768)}  # of all ranks
TOP_K = (1, 2, 4)


def own_part(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts that cost next to nothing."""
    return x


def sample_us(group: Collectives, device: torch.device, call: "Call") -> float:
    """Microseconds a call, of the slowest rank, median."""
    samples = []
    for _ in range(NUM_SAMPLES):
        group.all_reduce(torch.zeros(1, device=device))  # all begin together
        _synchronise(device)
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            call()
        _synchronise(device)
        own = torch.tensor([(time.perf_counter() - start) * 1e6 / NUM_CALLS], dtype=torch.float64, device=device)
        samples.append(float(group.all_gather(own).max()))
    return statistics.median(samples)


class Call:
    """One exchange of a layer."""

    def __init__(self, exchange: ScatteredRows, num_rows: int, mesh: Mesh, top_k: int, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tokens = [num_rows // mesh.world] * mesh.world
        generator = torch.Generator().manual_seed(mesh.rank)
        self._x = torch.randn(tokens[0], WIDTH[device.type], generator=generator).to(device, dtype)
        ids = torch.rand(tokens[0], NUM_EXPERTS, generator=generator).argsort(1)[:, :top_k].int()
        self._ids = ids.to(device)
        self._weights = torch.rand(tokens[0], top_k, generator=generator).to(device)
        self._exchange = exchange
        self._plans = [exchange.plan(tokens, None, eager_prefill=eager) for eager in (False, True)]
        self.selective = False

    def __call__(self) -> None:
        self._exchange.run(self._x, self._ids, self._weights, own_part, self._plans[self.selective])


def measure(world: World, mesh: Mesh) -> list[Row]:
    """All rows of a world."""
    group = world.communicators(mesh).world
    rows = []
    for top_k in TOP_K:
        exchange = ScatteredRows(mesh, group, world.device, num_experts=NUM_EXPERTS, top_k=top_k)
        saving = (1 - 1 / mesh.world) ** top_k
        for num_rows in ROWS[world.device.type]:
            call = Call(exchange, num_rows, mesh, top_k, world.device)
            times = {}
            for call.selective, name in ((False, "gather"), (True, "all_to_all")):
                call()
                times[name] = sample_us(group, world.device, call)
            case = f"ranks={mesh.world} rows={num_rows} k={top_k} width={WIDTH[world.device.type]} saving={saving:.2f}"
            for name, other in (("gather", "all_to_all"), ("all_to_all", "gather")):
                rows.append(
                    Row(case=f"way={name} {case}", ours_us=times[name], library=name, bounds={other: times[other]})
                )
    return rows


def bench(world: World) -> ExitCode:
    """Measures and, on rank 0, writes the results."""
    if world.size < 2:
        raise UsageError(f"several ranks are needed:{(__doc__ or '').split(chr(10) * 2)[1]}")
    torch.set_num_threads(1)
    # Both ways for every case.
    expert._MIN_SAVING, expert._MIN_SELECTIVE_ROWS = 0.0, 0
    rows = measure(world, Mesh.create(world=world.size, rank=world.rank, dp=world.size))
    if world.rank == 0:
        path = write_results("bench_expert", rows, device=world.device, num_devices=world.size)
        sys.stdout.write(f"{path}\n" + "".join(f"{row.case}: {row.ours_us:.0f} us\n" for row in rows))
    return ExitCode.DONE


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(run_world(bench))
