"""Tuning of experts: each way of each library runs on each size of a step, and the fastest is picked later."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_infer.kernels import tune_moe
from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library, Target, resolve
from dist_infer.kernels.moe_experts import LIBRARIES, MoeExpertsFunction
from dist_infer.kernels.tune import graph_us, ways_of
from dist_infer.kernels.tune_moe import Layer, measure_experts, rows_of
from tests.kernels.library_runs import named

CPU = Target(device=torch.device("cpu"), dtype=torch.float32)
LAYER = Layer(4, 2, 64, 64)


def test_rows_are_powers_of_two() -> None:
    assert rows_of(LAYER, 16) == [1, 2, 4, 8] and rows_of(LAYER, 15) == [1, 2, 4] and rows_of(LAYER, 1) == [1]


def test_every_way_runs_and_the_fastest_is_picked() -> None:
    """On the CPU the reference, and a twin that can be told; the clock prefers the twin when told, with many rows."""
    told: list[int] = []

    def twin(*given: Any, n: int = 0) -> torch.Tensor:
        told.append(n)
        return named(LIBRARIES, "torch").function(*given)

    libraries: tuple[Library[MoeExpertsFunction], ...] = (
        named(LIBRARIES, "cute"),
        named(LIBRARIES, "torch"),
        Library(name="twin", function=twin, tactics=({"n": 3},)),
    )
    shapes: list[tuple[int, ...]] = []

    def time_us(call: Callable[[], object]) -> float:
        before = len(told)
        out = call()
        assert isinstance(out, torch.Tensor) and bool(out.isfinite().all()) and bool(out.any())
        shapes.append(tuple(out.shape))
        return 1.0 if (told[before:] == [3]) is (len(out) > 1) else 2.0

    lines: list[str] = []
    found = measure_experts(CPU, [LAYER], time_us, libraries=libraries, max_pairs=8, on_progress=lines.append)
    assert shapes == [(rows, 64) for rows in (1, 2, 4) for _ in range(3)]
    assert lines == [f"4 experts of 64 x 64, {rows} rows" for rows in (1, 2, 4)]
    ways = [(entry.library, dict(entry.tactic), entry.sizes["pairs"]) for entry in found]
    assert ways == [("torch", {}, range(1, 3)), ("twin", {"n": 3}, range(3, 9))]
    target = Target(device=CPU.device, dtype=CPU.dtype, geometry=LAYER.geometry)
    selection = resolve("moe_experts", libraries, target, measured=found)
    assert [selection.pick({"pairs": pairs}).name for pairs in (1, 2, 3, 8, 9)] == 2 * ["torch"] + 2 * ["twin"] + [
        "torch"
    ]
    told.clear()
    empty = torch.zeros(0, 64)
    weights = torch.zeros(4, 128, 64), torch.zeros(4, 64, 64)
    given = (empty, empty[:, :2].int(), empty[:, :2], *weights, GatedActivation.SILU)
    selection.pick({"pairs": 8}).function(*given)
    assert told == [3]


@pytest.mark.gpu
def test_libraries_are_timed_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    layer = Layer(16, 2, 256, 128)
    found = measure_experts(Target(device=device, dtype=torch.bfloat16), [layer], graph_us(device), max_pairs=1024)
    assert found[-1].sizes["pairs"].stop == 1025 and found[0].device == torch.cuda.get_device_name(device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 700])
def test_no_way_changes_more_than_the_order_of_sums(rows: int) -> None:
    layer = Layer(16, 4, 256, 128)
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16, geometry=layer.geometry)
    given = (*tune_moe._routed(layer, rows, target, 0), *tune_moe._weights(layer, target), GatedActivation.SILU)
    libraries = resolve("moe_experts", LIBRARIES, target).libraries
    x, ids, factors, up, down, activation = given
    expected = named(LIBRARIES, "torch").function(
        x.double(), ids, factors.double(), up.double(), down.double(), activation
    )
    for way in ways_of(libraries):
        out = way.library.told(way.tactic).function(*given).double()
        assert (out - expected).norm() <= 0.01 * expected.norm(), way.label
