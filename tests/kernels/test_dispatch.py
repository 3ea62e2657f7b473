"""The choice between libraries: order, availability, sizes, and the reasons that are printed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_infer.kernels
from dist_infer.errors import UsageError
from dist_infer.kernels.dispatch import (
    Library,
    Phase,
    Sizes,
    Target,
    deferred,
    on_cute,
    on_triton,
    order_libraries,
    resolve,
)
from dist_infer.kernels.measured import Measured

CPU = Target(device=torch.device("cpu"), dtype=torch.float32, geometry={"head_dim": 64})


def needs_cuda(target: Target) -> str | None:
    return None if target.device.type == "cuda" else "needs a CUDA device"


def at_most_8_rows(sizes: Sizes) -> str | None:
    return None if sizes.get("rows", 0) <= 8 else "at most 8 rows"


def run_nothing() -> str:
    return "ran"


FAST = Library(name="fast", function=run_nothing, is_available=needs_cuda)
SMALL = Library(name="small", function=run_nothing, supports=at_most_8_rows)
TORCH = Library(name="torch", function=run_nothing)
OPT_IN = Library(name="opt_in", function=run_nothing, default=False)
LIBRARIES = (FAST, SMALL, TORCH, OPT_IN)


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("", ["fast", "small", "torch"]),
        (" , ,", ["fast", "small", "torch"]),
        ("torch", ["torch"]),
        ("torch, fast,torch", ["torch", "fast"]),
        ("opt_in", ["opt_in"]),
        ("+torch", ["torch", "fast", "small"]),
        ("+opt_in,-fast", ["opt_in", "small", "torch"]),
        ("-fast,-small", ["torch"]),
        ("+torch,+small", ["torch", "small", "fast"]),
    ],
)
def test_order(order: str, names: list[str]) -> None:
    assert [library.name for library in order_libraries("op", LIBRARIES, order)] == names


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("nope", "op has no library 'nope': choose from fast, small, torch, opt_in"),
        ("+nope", "no library 'nope'"),
        ("+", "no library ''"),
        ("torch,-fast", "use one form"),
        ("+torch,-torch", "both adds and removes 'torch'"),
    ],
)
def test_bad_order_is_refused(order: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        order_libraries("op", LIBRARIES, order)


def test_falls_through_to_the_next_library() -> None:
    selection = resolve("op", LIBRARIES, CPU)
    assert selection.pick({"rows": 8}) is SMALL
    assert selection.pick({"rows": 9}) is TORCH
    assert selection.pick().function() == "ran"


def test_explain_names_the_choice_and_every_reason() -> None:
    text = resolve("op", LIBRARIES, CPU).explain({"rows": 9})
    assert text == (
        "op: torch; fast rejected (needs a CUDA device); opt_in rejected (not in the order); "
        "small rejected (at most 8 rows)"
    )
    assert "torch comes later" in resolve("op", LIBRARIES, CPU).explain({"rows": 1})


def test_a_phase_is_chosen_by_itself() -> None:
    half = Library(name="half", function=run_nothing, phases=(Phase.GENERATION,))
    assert resolve("op", (half, TORCH), CPU, phase=Phase.GENERATION).pick() is half
    context = resolve("op", (half, TORCH), CPU, phase=Phase.CONTEXT)
    assert context.pick() is TORCH
    assert context.explain() == "op.context: torch; half rejected (has no context phase)"
    with pytest.raises(UsageError, match=r"op.context: none; half rejected \(has no context phase\)"):
        resolve("op", (half, TORCH), CPU, "half", phase=Phase.CONTEXT)


def test_what_was_measured_goes_first_unless_an_order_is_given() -> None:
    fast_at_many = Measured(device="cpu", op="op", library="torch", sizes={"rows": range(4, 7)}, figures="1 us")
    other_device = Measured(device="a GPU", op="op", library="torch", sizes={}, figures="1 us")
    of_other_heads = Measured(device="cpu", op="op", library="torch", sizes={"head_dim": range(8)}, figures="1 us")
    table = (other_device, of_other_heads, fast_at_many)
    selection = resolve("op", LIBRARIES, CPU, measured=table)
    assert selection.measured == (fast_at_many,)
    picked = [selection.pick({"rows": rows}) for rows in (3, 4, 6, 7)]
    assert picked == [SMALL, TORCH, TORCH, SMALL]
    assert selection.explain({"rows": 4}).startswith("op: torch; the fastest that was measured; fast rejected")
    assert selection.explain({"rows": 3}).startswith("op: small; fast rejected")
    assert resolve("op", LIBRARIES, CPU, "+small", measured=table).pick({"rows": 4}) is SMALL
    slow = Measured(device="cpu", op="op", library="fast", sizes={}, figures="not on this machine")
    assert resolve("op", LIBRARIES, CPU, measured=(slow,)).pick({"rows": 4}) is SMALL


def test_a_library_is_told_the_way_that_was_measured() -> None:
    def scaled(factor: int = 1) -> int:
        return 10 * factor

    library = Library(name="scaled", function=scaled, tactics=({"factor": 2}, {"factor": 3}))
    told = Measured(
        device="cpu", op="op", library="scaled", sizes={"rows": range(9)}, figures="f", tactic={"factor": 3}
    )
    gone = Measured(device="cpu", op="op", library="scaled", sizes={}, figures="f", tactic={"other": 1})
    libraries: tuple[Library[Any], ...] = (TORCH, library)
    selection = resolve("op", libraries, CPU, measured=(told, gone))
    assert [selection.pick({"rows": rows}).function() for rows in (3, 9)] == [30, 10]
    assert selection.explain({"rows": 3}).startswith("op: scaled; the fastest that was measured, factor 3; torch comes")
    assert selection.explain({"rows": 9}).startswith("op: scaled; the fastest that was measured; torch comes")


def test_nothing_left_is_an_error_with_the_reasons() -> None:
    with pytest.raises(UsageError, match=r"on cpu in torch.float32: op: none; fast rejected \(needs a CUDA device\)"):
        resolve("op", LIBRARIES, CPU, "fast")
    with pytest.raises(UsageError, match="at most 8 rows"):
        resolve("op", LIBRARIES, CPU, "small").pick({"rows": 9})


def test_bare_import_is_refused() -> None:
    path = Path(dist_infer.kernels.__file__)
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"import it as 'dist_infer\.kernels'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_deferred_function_is_imported_at_its_first_call() -> None:
    floor = deferred("math", "floor")
    assert floor(2.5) == 2
    missing = deferred("dist_infer.kernels.nowhere", "run")
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        missing()


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", torch.float32, "needs a GPU, not cpu"), ("cuda", torch.float64, "float64 is the reference's")],
)
def test_triton_says_why_it_stays_away(device: str, dtype: torch.dtype, reason: str) -> None:
    assert on_triton(Target(device=torch.device(device), dtype=dtype)) == reason


def test_triton_runs_on_a_gpu_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16)
    monkeypatch.setattr("dist_infer.kernels.dispatch.find_spec", lambda name: object())
    assert on_triton(target) is None
    monkeypatch.setattr("dist_infer.kernels.dispatch.find_spec", lambda name: None)
    assert on_triton(target) == "the package triton is missing: pip install triton"


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        ("cpu", torch.bfloat16, "needs a GPU, not cpu"),
        ("cuda", torch.float32, "takes bfloat16 and float16, not float32"),
    ],
)
def test_cute_says_why_it_stays_away(device: str, dtype: torch.dtype, reason: str) -> None:
    assert on_cute(Target(device=torch.device(device), dtype=dtype)) == reason


def test_cute_runs_on_hopper_where_its_packages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(device=torch.device("cuda"), dtype=torch.bfloat16)
    found = {"cutlass", "tvm_ffi"}
    monkeypatch.setattr("dist_infer.kernels.dispatch.find_spec", lambda name: name in found or None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert on_cute(target) is None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 0))
    assert on_cute(target) == "needs compute capability 9.0, not 10.0"
    found.remove("tvm_ffi")
    assert on_cute(target) == "tvm_ffi is missing: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
