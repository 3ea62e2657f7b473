"""All-reduce with residual, RMSNorm and quantiser through peer memory, beside NCCL and torch's symmetric memory.

    python -m dist_infer.launch.mpirun -n 2 -- python -m benchmarks.bench_all_reduce

Each rank has a GPU of its own. Without a launcher: ranks of one launch share the GPU (cases `one device`), which
measures protocol and epilogue but no wire, and has no peers.

A peer is another sum followed by one kernel for the rest, our own, which benchmarks/bench_rms_norm.py measures beside
what torch.compile makes of it. Calls of a sample are captured in one graph and take turns on a few sets
of inputs, which are in the cache where they fit, as they are behind the matrix product that made them. A sample is the
time of the slowest rank, a figure the median of samples that alternate between the candidates.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from benchmarks.timing import Row, write_results
from dist_infer.comm.all_reduce import FusedAllReduce, FusedOp, open_peer_room
from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.wire import NcclWire
from dist_infer.errors import ExitCode, UsageError
from dist_infer.kernels import all_reduce as op
from dist_infer.kernels import rms_norm as norm_op
from dist_infer.kernels import rms_norm_quant as quant_op
from dist_infer.kernels.all_reduce import AllReduceFunction, Epilogue, PeerLayout, PeerSpace
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.launch.world import World, run_world

TOKENS = (1, 2, 4, 16, 64, 128, 256, 1024, 4096)
QUANT_TOKENS = (1, 4, 16, 64, 128)
HIDDEN = {7168: ("none", "norm", "nvfp4", "mxfp8"), 6144: ("norm",)}  # and what follows the sum
NUM_SAMPLES = 13
NUM_SETS = 4
EPS = 1e-6
_LINK_BYTES_PER_S = 450e9  # NVLink of one H200, one direction

Call = Callable[[int], object]  # with the number of the set of inputs


@dataclass(frozen=True, slots=True)
class Inputs:
    """A few sets of the same sizes."""

    x: tuple[Tensor, ...]
    residual: tuple[Tensor, ...]
    weight: Tensor
    scale: Tensor

    @classmethod
    def make(cls, device: torch.device, *shape: int) -> "Inputs":
        """Of `shape`, whose last number is the hidden size."""
        x, residual = (tuple(torch.randn(shape, device=device).bfloat16() for _ in range(NUM_SETS)) for _ in range(2))
        weight = torch.randn(shape[-1], device=device).bfloat16()
        return cls(x, residual, weight, torch.ones(1, device=device))


def compare_us(calls: Mapping[str, Call], num_calls: int, slowest: Callable[[float], float]) -> dict[str, float]:
    """Microseconds a call of each; `slowest` lets all ranks begin together and gives the largest of their times."""
    graphs = {name: _captured(call, num_calls) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(NUM_SAMPLES):
        for name, graph in graphs.items():
            slowest(0.0)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(slowest(start.elapsed_time(end) * 1e3 / num_calls))
    return {name: statistics.median(values) for name, values in samples.items()}


def _captured(call: Call, num_calls: int) -> torch.cuda.CUDAGraph:
    for idx in range(NUM_SETS):
        call(idx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for idx in range(num_calls):
            call(idx % NUM_SETS)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _rest(kind: str, inputs: Inputs, idx: int, summed: Tensor) -> object:
    """What follows the sum, for the peers."""
    if kind == "none":
        return summed
    if kind == "norm":
        return norm_op.rms_norm(summed, inputs.weight, EPS, inputs.residual[idx], library=norm_op.LIBRARIES[0])
    quant_format = QuantFormat(kind)
    scale = inputs.scale if quant_format is QuantFormat.NVFP4 else None
    return quant_op.rms_norm_quant(
        summed,
        inputs.weight,
        EPS,
        inputs.residual[idx],
        quant_format,
        scale,
        with_norm=False,
        library=quant_op.LIBRARIES[0],
    )


_OPS = {
    "none": FusedOp.NONE,
    "norm": FusedOp.RESIDUAL_RMS_NORM,
    "nvfp4": FusedOp.RESIDUAL_RMS_NORM_QUANT_NVFP4,
    "mxfp8": FusedOp.RESIDUAL_RMS_NORM_QUANT_MXFP8,
}


def _fused(reduce: FusedAllReduce, kind: str, inputs: Inputs, idx: int) -> object:
    if kind == "none":
        return reduce(inputs.x[idx], FusedOp.NONE)
    return reduce(
        inputs.x[idx],
        _OPS[kind],
        residual=inputs.residual[idx],
        weight=inputs.weight,
        eps=EPS,
        scale=inputs.scale if kind == "nvfp4" else None,
    )


class TwoGpus:
    """Ours and the peers on the ranks of a launch."""

    def __init__(self, world: World, group: TorchCollectives, wire: NcclWire) -> None:
        self.device = world.device
        self.size = group.size
        self._group = group
        self._wire = wire
        target = Target(device=world.device, dtype=torch.bfloat16)
        self._room = open_peer_room(
            group, wire.group, max_tokens=max(TOKENS), row_bytes=2 * max(HIDDEN), device=world.device
        )
        self.ours = FusedAllReduce(group, target, room=self._room)
        most = max(TOKENS) * max(HIDDEN)
        self._symmetric = symmetric_memory.empty(most, dtype=torch.bfloat16, device=world.device)
        symmetric_memory.rendezvous(self._symmetric, wire.group)

    def close(self) -> None:
        """Give the peer memory back."""
        self._room.close()

    def slowest(self, own: float) -> float:
        """The largest of all ranks' values; all wait for each other."""
        values = self._group.all_gather(torch.tensor([own], dtype=torch.float64, device=self.device))
        return float(values.max())

    def peers(self, kind: str, inputs: Inputs) -> dict[str, Call]:
        """The other sums with the rest behind them. They sum in place or from one buffer, whatever is there."""
        num_elements = inputs.x[0].numel()
        shared = self._symmetric[:num_elements].view(inputs.x[0].shape)
        shared.copy_(inputs.x[0])
        summed = [x.clone() for x in inputs.x]  # again and again, in place
        name = self._wire.group.group_name

        def nccl(idx: int) -> object:
            self._wire.group.allreduce([summed[idx]]).wait()
            return _rest(kind, inputs, idx, summed[idx])

        def one_shot(idx: int) -> object:
            return _rest(kind, inputs, idx, torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name))

        def two_shot(idx: int) -> object:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
            return _rest(kind, inputs, idx, shared)

        rest = "" if kind == "none" else " + one kernel"
        return {f"NCCL{rest}": nccl, f"symm_mem one-shot{rest}": one_shot, f"symm_mem two-shot{rest}": two_shot}

    def row(self, kind: str, num_tokens: int, hidden: int) -> Row:
        """The strategy that AUTO chooses, beside the peers."""
        inputs = Inputs.make(self.device, num_tokens, hidden)
        num_calls = 60 if num_tokens <= 256 else 50
        calls: dict[str, Call] = {"ours": partial(_fused, self.ours, kind, inputs)}
        peers = self.peers(kind, inputs)
        found = compare_us(calls | peers, num_calls, self.slowest)
        num_bytes = num_tokens * hidden * 2
        case = f"{kind} bfloat16 tokens={num_tokens} hidden={hidden} ranks={self.size}"
        floor_us = 2 * (self.size - 1) / self.size * num_bytes / _LINK_BYTES_PER_S * 1e6
        return Row(
            case=case,
            ours_us=found["ours"],
            library=self.ours.strategy_for(inputs.x[0], _OPS[kind]).value,
            floor_us=floor_us,
            peers={name: found[name] for name in peers},
        )


def _on_one_device(run: AllReduceFunction, space: PeerSpace, kind: str, inputs: Inputs, idx: int) -> object:
    residual = inputs.residual[idx]
    epilogue = Epilogue() if kind == "none" else Epilogue(residual=residual, weight=inputs.weight, eps=EPS)
    return run(inputs.x[idx], epilogue, space)


def rows_on_one_device(device: torch.device) -> Iterator[Row]:
    """Ranks of one launch: what follows the sum beside the sum alone."""
    one_shot = partial(op.one_shot, library=op.ONE_SHOT_LIBRARIES[0])
    two_shot = partial(op.two_shot, library=op.TWO_SHOT_LIBRARIES[0])
    for num_ranks in (2, 4, 8):
        layout = PeerLayout(num_ranks=num_ranks, row_bytes=2 * 7168, one_shot_rows=64, two_shot_rows=64)
        space = op.space_on_one_device(layout, device)
        for num_tokens in (1, 4, 16):
            inputs = Inputs.make(device, num_ranks, num_tokens, 7168)
            for name, run in (("one_shot", one_shot), ("two_shot", two_shot)):
                calls = {kind: partial(_on_one_device, run, space, kind, inputs) for kind in ("none", "norm")}
                found = compare_us(calls, 60, lambda own: own)
                case = f"bfloat16 tokens={num_tokens} hidden=7168 ranks={num_ranks} one device way={name}"
                yield Row(case=f"none {case}", ours_us=found["none"], library=name)
                yield Row(case=f"norm {case}", ours_us=found["norm"], library=name, bounds={"sum": found["none"]})


def bench(world: World) -> ExitCode:
    """Measures and, on rank 0, writes the results."""
    if world.device.type != "cuda":
        raise UsageError("GPUs are needed")
    rows: list[Row] = []
    if world.size == 1:
        rows += rows_on_one_device(world.device)
    else:
        group: Collectives = world.communicators(Mesh.create(world=world.size, rank=world.rank)).tp
        if not isinstance(group, TorchCollectives) or not isinstance(group.wire, NcclWire):
            raise UsageError("each rank needs a GPU of its own")
        ranks = TwoGpus(world, group, group.wire)
        for hidden, kinds in HIDDEN.items():
            for kind in kinds:
                for num_tokens in TOKENS if kind in ("none", "norm") else QUANT_TOKENS:
                    rows.append(ranks.row(kind, num_tokens, hidden))
        ranks.close()
    if world.rank == 0:
        path = write_results("bench_all_reduce", rows, device=world.device, num_devices=world.size)
        lines = [
            f"{row.case}: {row.ours_us:.2f} us { ({name: round(us, 2) for name, us in row.peers.items()}) }\n"
            for row in rows
        ]
        sys.stdout.write(f"{path}\n{''.join(lines)}")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(run_world(bench))
