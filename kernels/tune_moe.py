"""Measures which library of routed experts is the fastest on this device, by the size of the layer and of its step.

It is never called while a model is served: `dist-infer tune moe` does it, and keeps what it finds in a file.

R rows, K experts a row, E experts held, D model, I intermediate channels held.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library, Target, resolve
from dist_infer.kernels.measured import Measured, exactly
from dist_infer.kernels.moe_experts import LIBRARIES, MoeExpertsFunction
from dist_infer.kernels.tune import Time, entries, ways_of

OP = "moe_experts"
MAX_PAIRS = 1 << 16
_ROUTINGS = 4  # one after another, so that few experts' weights don't stay in the cache


class Layer(NamedTuple):
    """The experts that a rank holds."""

    experts: int
    top_k: int
    width: int
    intermediate: int

    @property
    def geometry(self) -> dict[str, int]:
        """As the layer names it when it chooses."""
        return {"experts": self.experts, "width": self.width, "intermediate": self.intermediate}


def measure_experts(
    target: Target,
    layers: Sequence[Layer],
    time_us: Time,
    *,
    libraries: Sequence[Library[MoeExpertsFunction]] = LIBRARIES,
    max_pairs: int | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """The entries of this device for these layers, by the pairs of a row and an expert that a step has.

    Experts are drawn evenly.
    """
    found = []
    for layer in layers:
        own = Target(device=target.device, dtype=target.dtype, geometry=layer.geometry)
        able = resolve(OP, libraries, own).libraries
        ways = ways_of(tuple(library for library in able if library.graph_safe) or able)
        weights = _weights(layer, target)
        times: list[tuple[int, dict[str, float]]] = []
        for rows in rows_of(layer, max_pairs or MAX_PAIRS):
            on_progress(f"{layer.experts} experts of {layer.width} x {layer.intermediate}, {rows} rows")
            routed = [_routed(layer, rows, target, seed) for seed in range(_ROUTINGS)]
            of_way = {}
            for way in ways:
                function = way.library.told(way.tactic).function
                of_way[way.label] = time_us(_call(function, routed, weights))
            times.append((rows * layer.top_k, of_way))
        found += entries(target.device_name, OP, ways, exactly(layer.geometry), "pairs", times, "us")
    return found


def rows_of(layer: Layer, max_pairs: int) -> list[int]:
    """Powers of two: a step takes the entry of the next larger one."""
    most = max(1, max_pairs // layer.top_k)
    return [1 << power for power in range(most.bit_length())]


def _weights(layer: Layer, target: Target) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(target.device).manual_seed(0)

    def normal(rows: int, width: int) -> Tensor:
        weight = torch.empty(layer.experts, rows, width, dtype=target.dtype, device=target.device)
        return weight.normal_(std=width**-0.5, generator=generator)

    return normal(2 * layer.intermediate, layer.width), normal(layer.width, layer.intermediate)


def _routed(layer: Layer, rows: int, target: Target, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, ids, factors)."""
    generator = torch.Generator(target.device).manual_seed(seed)
    x = torch.empty(rows, layer.width, dtype=target.dtype, device=target.device).normal_(generator=generator)
    drawn = torch.rand(rows, layer.experts, device=target.device, generator=generator)
    factors, ids = drawn.topk(layer.top_k, 1)
    return x, ids.int(), factors


def _call(
    function: MoeExpertsFunction, routed: Sequence[tuple[Tensor, Tensor, Tensor]], weights: tuple[Tensor, Tensor]
) -> Callable[[], object]:
    inputs = cycle(routed)
    return lambda: function(*next(inputs), *weights, GatedActivation.SILU)
