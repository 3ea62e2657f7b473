"""Measures the ways of an all-reduce between the ranks of a launch. T tokens, D hidden."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dist_infer.comm.all_reduce import FusedAllReduce, FusedOp, PeerRoom
from dist_infer.comm.all_reduce_table import steps_of
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.strategy import Strategy, Table
from dist_infer.kernels.dispatch import Target

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
OPS = (FusedOp.NONE, FusedOp.RESIDUAL_RMS_NORM, FusedOp.RESIDUAL_RMS_NORM_QUANT_NVFP4_LINEAR)  # one of each kind
STRATEGIES = (Strategy.ONE_SHOT, Strategy.TWO_SHOT)
_NUM_SAMPLES = 9
_NUM_CALLS = 30


def measure_table(
    group: Collectives,
    target: Target,
    room: PeerRoom,
    *,
    hidden_sizes: Sequence[int],
    on_progress: Callable[[str], None],
) -> Table:
    """The entries of this device and this number of ranks, the same on all ranks: the slowest one's times count.

    Ranks: collective over the group.
    """
    ways = {strategy: FusedAllReduce(group, target, room=room, strategy=strategy) for strategy in STRATEGIES}
    limits = {Strategy.ONE_SHOT: room.layout.one_shot_rows, Strategy.TWO_SHOT: room.layout.two_shot_rows}
    device = torch.cuda.get_device_name(target.device)
    table = {}
    for hidden in hidden_sizes:
        for fused_op in OPS:
            times = []
            for num_tokens in (tokens for tokens in TOKENS if tokens <= max(limits.values())):
                on_progress(f"{fused_op.kind}, hidden {hidden}, {num_tokens} tokens")
                fitting = {strategy: way for strategy, way in ways.items() if num_tokens <= limits[strategy]}
                times.append((num_tokens, _times_us(group, fitting, fused_op, num_tokens, hidden, target)))
            table[device, group.size, fused_op.kind, hidden] = steps_of(times)
    return table


def _times_us(
    group: Collectives,
    ways: dict[Strategy, FusedAllReduce],
    fused_op: FusedOp,
    num_tokens: int,
    hidden: int,
    target: Target,
) -> dict[Strategy, float]:
    x, residual = (torch.randn(num_tokens, hidden, device=target.device).to(target.dtype) for _ in range(2))
    weight = torch.ones(hidden, dtype=target.dtype, device=target.device)
    given: dict[str, Any] = {"residual": residual if fused_op.value.has_residual else None}
    given["weight"] = weight if fused_op.value.has_norm else None
    graphs = {strategy: _captured(partial(reduce, x, fused_op, **given)) for strategy, reduce in ways.items()}
    samples: dict[Strategy, list[float]] = {strategy: [] for strategy in ways}
    for _ in range(_NUM_SAMPLES):
        for strategy, graph in graphs.items():
            samples[strategy].append(_slowest(group, _replay_us(group, graph, target.device), target.device))
    return {strategy: statistics.median(values) for strategy, values in samples.items()}


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NUM_CALLS):
            call()
    return graph


def _replay_us(group: Collectives, graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    _slowest(group, 0.0, device)  # all begin together
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _NUM_CALLS


def _slowest(group: Collectives, own: float, device: torch.device) -> float:
    return float(group.all_gather(torch.tensor([own], dtype=torch.float64, device=device)).max())
