"""Samples of all-reduces: the calls of a graph take turns on sets of inputs, beside those of other candidates."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_SAMPLES = 13
NUM_SETS = 4
EPS = 1e-6

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


def compare_us(
    calls: Mapping[str, Call],
    num_calls: int,
    slowest: Callable[[float], float] = lambda own: own,
    start_together: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Microseconds a call of each.

    `slowest` gives the largest of all ranks' times. `start_together` puts a point on the stream that all devices reach
    at the same time, later than the host has put the calls behind it.
    """
    graphs = {name: _captured(call, num_calls) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(NUM_SAMPLES):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start_together()
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
