"""All-reduce with residual, RMSNorm and quantiser through peer memory, beside NCCL and torch's symmetric memory.

    python -m dist_infer.launch.mpirun -n 2 -- python -m benchmarks.bench_all_reduce

Each rank has a GPU of its own; a case names what is fused and, where AUTO hasn't chosen it, the strategy. Without a
launcher: `virtual` cases, whose ranks are one launch on the one GPU, which measures the protocol but no wire, and has
no peers. A case `epilogue` is the difference that what follows the sum makes.

A peer is another sum followed by one kernel for the rest, our own, which benchmarks/bench_rms_norm.py measures beside
what torch.compile makes of it. Calls of a sample are captured in one graph and take turns on a few sets
of inputs, which are in the cache where they fit, as they are behind the matrix product that made them. A sample is the
time of the slowest rank, a figure the median of samples that alternate between the candidates. The devices begin a
sample together: else the time in which one waits for the other's host would be shared out to the calls.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from benchmarks import virtual_ranks
from benchmarks.all_reduce_samples import EPS, Call, Inputs, compare_us
from benchmarks.timing import Row, write_results
from dist_infer.comm.all_reduce import FusedAllReduce, FusedOp, open_peer_room
from dist_infer.comm.collectives import Collectives, TorchCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.strategy import Strategy
from dist_infer.comm.wire import NcclWire
from dist_infer.errors import ExitCode, UsageError
from dist_infer.kernels import rms_norm as norm_op
from dist_infer.kernels import rms_norm_quant as quant_op
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.launch.world import World, run_world

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
QUANT_TOKENS = (1, 4, 16, 64)
OPS: Mapping[int, Mapping[FusedOp, tuple[int, ...]]] = {
    7168: {
        FusedOp.NONE: TOKENS,
        FusedOp.RESIDUAL_RMS_NORM: TOKENS,
        FusedOp.RESIDUAL_RMS_NORM_QUANT_NVFP4: QUANT_TOKENS,
        FusedOp.RESIDUAL_RMS_NORM_QUANT_MXFP8: QUANT_TOKENS,
    },
    6144: {FusedOp.NONE: TOKENS, FusedOp.RESIDUAL_RMS_NORM: TOKENS},
}  # by hidden size
_START_CYCLES = 300_000  # of the device, in which the host launches a graph
_LINK_BYTES_PER_S = 450e9  # NVLink of one H200, one direction


def _rest(fused_op: FusedOp, inputs: Inputs, idx: int, summed: Tensor) -> object:
    """What follows the sum, for the peers."""
    if fused_op is FusedOp.NONE:
        return summed
    quant_format = fused_op.value.quant_format
    if quant_format is None:
        return norm_op.rms_norm(summed, inputs.weight, EPS, inputs.residual[idx], library=norm_op.LIBRARIES[0])
    return quant_op.rms_norm_quant(
        summed,
        inputs.weight,
        EPS,
        inputs.residual[idx],
        quant_format,
        inputs.scale if quant_format is QuantFormat.NVFP4 else None,
        with_norm=False,
        library=quant_op.LIBRARIES[0],
    )


def _fused(reduce: FusedAllReduce, fused_op: FusedOp, inputs: Inputs, idx: int) -> object:
    if fused_op is FusedOp.NONE:
        return reduce(inputs.x[idx], fused_op)
    return reduce(
        inputs.x[idx],
        fused_op,
        residual=inputs.residual[idx],
        weight=inputs.weight,
        eps=EPS,
        scale=inputs.scale if fused_op.value.quant_format is QuantFormat.NVFP4 else None,
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
            group, wire.group, max_tokens=max(TOKENS), row_bytes=2 * max(OPS), device=world.device
        )
        self.ours = {
            strategy: FusedAllReduce(group, target, room=self._room, strategy=strategy)
            for strategy in (Strategy.AUTO, Strategy.ONE_SHOT, Strategy.TWO_SHOT)
        }
        most = max(TOKENS) * max(OPS)
        self._symmetric = symmetric_memory.empty(most, dtype=torch.bfloat16, device=world.device)
        symmetric_memory.rendezvous(self._symmetric, wire.group)

    def close(self) -> None:
        """Give the peer memory back."""
        self._room.close()

    def slowest(self, own: float) -> float:
        """The largest of all ranks' values; all wait for each other."""
        values = self._group.all_gather(torch.tensor([own], dtype=torch.float64, device=self.device))
        return float(values.max())

    def start_together(self) -> None:
        """See compare_us."""
        self.slowest(0.0)
        torch.cuda._sleep(_START_CYCLES)  # type: ignore[no-untyped-call]
        self._group.all_gather(torch.zeros(1, device=self.device))

    def peers(self, fused_op: FusedOp, inputs: Inputs) -> dict[str, Call]:
        """The other sums with the rest behind them. They sum in place or from one buffer, whatever is there."""
        num_elements = inputs.x[0].numel()
        shared = self._symmetric[:num_elements].view(inputs.x[0].shape)
        shared.copy_(inputs.x[0])
        summed = [x.clone() for x in inputs.x]  # again and again, in place
        name = self._wire.group.group_name

        def nccl(idx: int) -> object:
            self._wire.group.allreduce([summed[idx]]).wait()
            return _rest(fused_op, inputs, idx, summed[idx])

        def one_shot(idx: int) -> object:
            return _rest(fused_op, inputs, idx, torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name))

        def two_shot(idx: int) -> object:
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
            return _rest(fused_op, inputs, idx, shared)

        rest = "" if fused_op is FusedOp.NONE else " + one kernel"
        return {f"NCCL{rest}": nccl, f"symm_mem one-shot{rest}": one_shot, f"symm_mem two-shot{rest}": two_shot}

    def rows(self, num_tokens: int, hidden: int) -> Iterator[Row]:
        """All ops on the same inputs: what AUTO chooses and, for the norm, both ways, beside the peers.

        Where the inputs lie in memory is worth a microsecond, so what is compared has the same ones.
        """
        inputs = Inputs.make(self.device, num_tokens, hidden)
        ours: dict[tuple[FusedOp, Strategy], FusedAllReduce] = {}
        calls: dict[str, Call] = {}
        peers: dict[FusedOp, list[str]] = {}
        for fused_op in (fused_op for fused_op, sizes in OPS[hidden].items() if num_tokens in sizes):
            for strategy, reduce in self.ours.items():
                forced = (
                    fused_op is FusedOp.RESIDUAL_RMS_NORM and reduce.strategy_for(inputs.x[0], fused_op) is strategy
                )
                if strategy is Strategy.AUTO or forced:
                    ours[fused_op, strategy] = reduce
                    calls[f"{fused_op.name} {strategy.name}"] = partial(_fused, reduce, fused_op, inputs)
            others = self.peers(fused_op, inputs)
            peers[fused_op] = list(others)
            calls |= {f"{fused_op.name} {name}": call for name, call in others.items()}
        found = compare_us(calls, 60 if num_tokens <= 256 else 50, self.slowest, self.start_together)
        num_bytes = num_tokens * hidden * 2
        for (fused_op, strategy), reduce in ours.items():
            case = f"{fused_op.name.lower()} h={hidden} tokens={num_tokens}"
            yield Row(
                case=case if strategy is Strategy.AUTO else f"strategy={strategy.value} {case}",
                ours_us=found[f"{fused_op.name} {strategy.name}"],
                library=reduce.strategy_for(inputs.x[0], fused_op).value,
                floor_us=2 * (self.size - 1) / self.size * num_bytes / _LINK_BYTES_PER_S * 1e6,
                peers={name: found[f"{fused_op.name} {name}"] for name in peers[fused_op]},
            )


def bench(world: World) -> ExitCode:
    """Measures and, on rank 0, writes the results."""
    if world.device.type != "cuda":
        raise UsageError("GPUs are needed")
    if world.size == 1:
        _report(list(virtual_ranks.rows(world.device)), world)
        return ExitCode.DONE
    group: Collectives = world.communicators(Mesh.create(world=world.size, rank=world.rank)).tp
    if not isinstance(group, TorchCollectives) or not isinstance(group.wire, NcclWire):
        raise UsageError("each rank needs a GPU of its own")
    ranks = TwoGpus(world, group, group.wire)
    rows: list[Row] = []
    for hidden in OPS:
        for num_tokens in TOKENS:
            rows += ranks.rows(num_tokens, hidden)
        _report(rows, world)
    ranks.close()
    return ExitCode.DONE


def _report(rows: Sequence[Row], world: World) -> None:
    """All rows so far. Ranks: rank 0 writes."""
    if world.rank == 0:
        path = write_results("bench_all_reduce", rows, device=world.device, num_devices=world.size)
        lines = [
            f"{row.case}: {row.ours_us:.2f} us { ({name: round(us, 2) for name, us in row.peers.items()}) }\n"
            for row in rows
        ]
        sys.stdout.write(f"{path}\n{''.join(lines)}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run_world(bench))
