"""Collectives between the ranks of one launch, beside the library's own all-reduce and, on CPUs, beside ours over gloo.

    python -m dist_infer.launch.mpirun -n 4 -- python -m benchmarks.bench_collectives

With more than two ranks, the first two are measured alone too, while the others wait. Every rank makes the same number
of calls, and a sample is the time of the slowest: benchmarks.timing fits its number of calls to the clock of one
process, so ranks that used it would call differently often and wait for each other for ever.

Forced rows (`way=whole`, `way=sliced`) are what the limit of comm.collectives is set by. The library's sum has another
order from three ranks on, so there it is a bound, not a peer.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from benchmarks.timing import Row, write_results
from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.errors import ExitCode, UsageError
from dist_infer.launch.world import World, run_world

SIZES_BYTES = (1024, 8 * 1024, 64 * 1024, 512 * 1024, 8 * 2**20)
NUM_SAMPLES = 15
_LINK_BYTES_PER_S = 450e9  # NVLink of one H200, one direction

Call = Callable[[], object]


def sample_us(group: Collectives, call: Call, num_calls: int, device: torch.device) -> float:
    """Microseconds a call, of the slowest rank, median of NUM_SAMPLES."""
    run_us = _graph_timer(call, num_calls) if device.type == "cuda" else _host_timer(call, num_calls)
    samples = []
    for _ in range(NUM_SAMPLES):
        group.all_reduce(torch.zeros(1, device=device))  # all begin together
        own = torch.tensor([run_us()], dtype=torch.float64, device=device)
        samples.append(float(group.all_gather(own).max()))
    return statistics.median(samples)


def _host_timer(call: Call, num_calls: int) -> Callable[[], float]:
    def run_us() -> float:
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - start) * 1e6 / num_calls

    return run_us


def _graph_timer(call: Call, num_calls: int) -> Callable[[], float]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    graph.replay()
    torch.cuda.synchronize()

    def run_us() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / num_calls

    return run_us


def measure(
    group: Collectives, gloo: Collectives | None, library: dist.ProcessGroup, device: torch.device, num_bytes: int
) -> Iterator[Row]:
    """The rows of one size on one group. `gloo`: the same ranks over gloo, where that is another wire."""
    if not isinstance(group, TorchCollectives):
        raise UsageError("one rank has no wire to measure")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.ones(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    num_calls = 20 if num_bytes < 2**20 else 5

    def timed(call: Call) -> float:
        return sample_us(group, call, num_calls, device)

    case = f"{str(dtype).removeprefix('torch.')} bytes={num_bytes} ranks={group.size}"
    ours = "gather" if gloo is None else "gather over shm"
    other = {f"{dist.get_backend(library)} all_reduce": timed(lambda: library.allreduce([x]).wait())}

    def over_gloo(name: str) -> dict[str, float]:
        return {} if gloo is None else {"gather over gloo": timed(lambda: getattr(gloo, name)(x))}

    on_gpu = device.type == "cuda"
    floor = 2 * (group.size - 1) / group.size * num_bytes / _LINK_BYTES_PER_S * 1e6 if on_gpu else None
    yield Row(
        case=f"all_reduce {case}",
        ours_us=timed(lambda: group.all_reduce(x)),
        library=ours,
        floor_us=floor,
        peers=over_gloo("all_reduce") | (other if group.size == 2 else {}),
        bounds={} if group.size == 2 else other,
    )
    for way, limit in (("whole", sys.maxsize), ("sliced", 0)):
        usual, group.max_whole_bytes = group.max_whole_bytes, limit
        yield Row(case=f"way={way} all_reduce {case}", ours_us=timed(lambda: group.all_reduce(x)), library=ours)
        group.max_whole_bytes = usual
    for name in ("all_gather", "reduce_scatter"):
        call = partial(getattr(group, name), x)
        yield Row(case=f"{name} {case}", ours_us=timed(call), library=ours, peers=over_gloo(name))


def library_group(world: World, mesh: Mesh) -> dist.ProcessGroup:
    """The library's own group of the mesh's tp axis: NCCL where the world has opened it, else gloo."""
    if not dist.is_initialized():
        store = PrefixStore("library", world.store)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    groups: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in mesh.partition("tp")]
    return groups[mesh.dp_rank]


def bench(world: World) -> ExitCode:
    """Measures and, on rank 0, writes the results."""
    if world.size < 2:
        raise UsageError(f"several ranks are needed:{(__doc__ or '').split(chr(10) * 2)[1]}")
    torch.set_num_threads(1)
    meshes = [Mesh.create(world=world.size, rank=world.rank)]
    if world.size > 2 and world.size % 2 == 0:
        meshes.insert(0, Mesh.create(world=world.size, rank=world.rank, dp=world.size // 2))
    rows: list[Row] = []
    for mesh in meshes:
        group = world.communicators(mesh).tp
        gloo = world.communicators(mesh, "gloo").tp if world.device.type == "cpu" else None
        library = library_group(world, mesh)
        for num_bytes in SIZES_BYTES:
            if mesh.dp_rank == 0:
                rows += measure(group, gloo, library, world.device, num_bytes)
            world.all_min([0])  # the others wait, asleep
    if world.rank == 0:
        path = write_results("bench_collectives", rows, device=world.device, num_devices=world.size)
        sys.stdout.write(f"{path}\n" + "".join(f"{row.case}: {row.ours_us:.0f} us {dict(row.peers)}\n" for row in rows))
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(run_world(bench))
