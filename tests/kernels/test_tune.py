"""Tuning of latent attention: ranges of the fastest, a file that is read back, or refused with the reason."""

import json
from collections.abc import Callable

import pytest
import torch

from dist_infer.kernels.dispatch import Library, Target, resolve
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.mla_attention import LIBRARIES, PlanFunction
from dist_infer.kernels.tune import entries, from_json, graph_us, measure_attention, to_json, ways_of
from tests.kernels.library_runs import named

CPU = Target(device=torch.device("cpu"), dtype=torch.float32)
VERSIONS = {"dist_infer": "1", "torch": "2"}


def run_nothing() -> None:
    return None


def test_neighbours_of_one_winner_are_one_range() -> None:
    ways = ways_of([Library(name=name, function=run_nothing) for name in "ab"])
    times = [
        (1, {"a": 1.0, "b": 2.0}),
        (2, {"a": 1.0, "b": 2.0}),
        (8, {"a": 5.0, "b": 4.0}),
        (16, {"a": 3.0, "b": 9.0}),
    ]
    sizes = {"heads": range(16, 17), "cache_bytes": range(2, 3)}
    found = entries("dev", "op", ways, sizes, "seqs", times, "us, at 1024")
    assert [(entry.library, entry.sizes["seqs"]) for entry in found] == [
        ("a", range(1, 3)),
        ("b", range(3, 9)),
        ("a", range(9, 17)),
    ]
    assert all(entry.sizes["heads"] == range(16, 17) and entry.sizes["cache_bytes"] == range(2, 3) for entry in found)
    assert "us, at 1024 at 8 seqs: a 5.0, b 4.0" in found[1].figures


def test_a_library_is_told_what_gains_more_than_times_scatter() -> None:
    ways = ways_of([Library(name="a", function=run_nothing, tactics=({"n": 1}, {"n": 2}))])
    assert [way.label for way in ways] == ["a", "a n 1", "a n 2"]
    times = [
        (1, {"a": 1.0, "a n 1": 0.99, "a n 2": 1.2}),
        (2, {"a": 1.0, "a n 1": 1.3, "a n 2": 0.9}),
    ]
    found = entries("dev", "op", ways, {}, "seqs", times, "us")
    assert [(entry.tactic, entry.sizes["seqs"]) for entry in found] == [({}, range(1, 2)), ({"n": 2}, range(2, 3))]


def test_every_library_runs_and_the_fastest_is_picked() -> None:
    """On the CPU the reference and a twin of it, on a clock that prefers the twin for few sequences."""
    twin: Library[PlanFunction] = Library(name="twin", function=named(LIBRARIES, "reference").function)
    libraries = (named(LIBRARIES, "cute"), named(LIBRARIES, "reference"), twin)
    shapes: list[tuple[int, ...]] = []

    def time_us(call: Callable[[], object]) -> float:
        out = call()
        assert isinstance(out, torch.Tensor) and bool(out.isfinite().all())
        shapes.append(tuple(out.shape))
        is_twin = len(shapes) % 2 == 0
        return 1.0 if is_twin is (out.shape[0] <= 2) else 2.0

    told: list[str] = []
    found = measure_attention(
        CPU, [3], time_us, libraries=libraries, num_seqs=(1, 2, 4), contexts=(64,), on_progress=told.append
    )
    ranges = [(entry.library, entry.sizes["seqs"]) for entry in found]
    assert ranges == [("twin", range(1, 3)), ("reference", range(3, 5))]
    assert shapes == [(seqs, 3, 128) for seqs in (1, 1, 2, 2, 4, 4)]
    assert told == [f"3 heads, {seqs} sequences" for seqs in (1, 2, 4)]
    target = Target(device=CPU.device, dtype=CPU.dtype, geometry={"heads": 3, "cache_bytes": 4})
    selection = resolve("mla_attention.generation", libraries, target, measured=found)
    assert [selection.pick({"seqs": seqs}).name for seqs in (1, 2, 3, 4, 5)] == [
        "twin",
        "twin",
        "reference",
        "reference",
        "reference",
    ]


ENTRY = Measured(device="d", op="o", library="l", sizes={"seqs": range(1, 9)}, figures="f", tactic={"n": 3})


def test_a_file_is_read_back() -> None:
    assert from_json(to_json([ENTRY], VERSIONS), VERSIONS) == [ENTRY]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "no table of measurements"),
        (json.dumps({"schema": 1, "versions": VERSIONS, "entries": []}), "another form"),
        (json.dumps({"schema": 2, "versions": {"torch": "1"}, "entries": []}), "was made with"),
        (json.dumps({"schema": 2, "versions": VERSIONS, "entries": [{"device": "d"}]}), "no table of measurements"),
        (to_json([ENTRY], VERSIONS).replace('"seqs": [', '"seqs": 1, "x": ['), "no table"),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(text, VERSIONS)


@pytest.mark.gpu
def test_libraries_are_timed_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    target = Target(device=device, dtype=torch.bfloat16)
    found = measure_attention(target, [16], graph_us(device), num_seqs=(1, 8), contexts=(1024,))
    assert found[-1].sizes["seqs"].stop == 9 and found[0].device == torch.cuda.get_device_name(device)
