from io import StringIO
from typing import Any

from rich.console import Console

from dist_infer.cli.bench_table import render

NONE = dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
FIELDS: dict[str, Any] = {
    "model": "tiny",
    "dtype": "float32",
    "layout": {"tp": 2, "dp": 1, "ep": 2},
    "outcome": "done",
    "bench": {"dataset": "random", "requests": 8, "request_rate": None},
    "requests": {"ok": 7, "failed": 0},
    "tokens": {"prompt": 4096, "output": 1234567},
    "seconds": {"load": 1.0, "serve": 12.345},
    "per_second": {"requests": 0.5671, "output_tokens": 98765.4, "total_tokens": None},
    "latency_s": {
        "first_token_from_submission": {"mean": 0.5, "p50": 0.25, "p90": 1.0, "p99": 2.0, "max": 2.5},
        "per_later_token": NONE,
        "between_tokens": {**NONE, "p99": 0.00123456},
        "whole_request": NONE,
    },
}


def shown(fields: dict[str, Any]) -> list[list[str]]:
    """The cells of each row."""
    console = Console(file=StringIO(), width=100)
    console.print(render(fields))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_figures_have_four_digits() -> None:
    rows = {cells[0]: cells[1:] for cells in shown(FIELDS)}
    assert rows["requests"] == ["7 of 8"]
    assert rows["requests come"] == ["all at once"]
    assert rows["output tokens"] == ["1,234,567"]
    assert rows["seconds"] == ["12.35"] or rows["seconds"] == ["12.34"]
    assert rows["output tokens a second"] == ["98,765"]
    assert rows["all tokens a second"] == ["-"]
    assert rows["time to first token"] == ["500", "250", "1,000", "2,000", "2,500"]
    assert rows["inter-token latency"] == ["-", "-", "-", "1.235", "-"]


def test_steps_on_a_gpu_and_on_a_cpu() -> None:
    times = {"count": 3, "mean": 4600.0, "p50": 4500.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    decode = {
        "steps": 1200,
        "as_graphs": 1199,
        "sequences_mean": 31.5,
        "kv_tokens_mean": 1e4,
        "busy_us": times,
        "gap_us": {**times, "p50": 3.0},
        "busy_share": 0.98765,
        "floor_share": 0.7431,
    }
    others = {"steps": 0, "tokens_mean": None, "busy_us": dict.fromkeys(times)}
    libraries = {"linear": ["triton", "torch"], "rms_norm": ["triton"]}
    profile = {"num_kernels": 292, "busy_us": 1.0, "span_us": 1.0, "kernels": []}
    steps: dict[str, Any] = {
        "device": "cuda",
        "decode": decode,
        "others": others,
        "profile": profile,
        "libraries": libraries,
    }
    rows = {cells[0]: cells[1] for cells in shown({**FIELDS, "steps": steps})}
    assert (rows["decode steps"], rows["of them as graphs"], rows["sequences of one"]) == ("1,200", "1,199", "31.5")
    assert (rows["milliseconds of one"], rows["microseconds of the GPU between two"]) == ("4.5", "3")
    assert (rows["GPU busy"], rows["of the memory floor"], rows["kernels of one"]) == ("98.8 %", "74.3 %", "292")
    assert (rows["linear"], rows["rms_norm"]) == ("triton, torch", "triton")
    steps |= {"device": "cpu", "profile": None, "decode": {**decode, "floor_share": None}}
    rows = {cells[0]: cells[1] for cells in shown({**FIELDS, "steps": steps})}
    assert (rows["model busy"], rows["kernels of one"]) == ("98.8 %", "only on a GPU")
    assert rows["of the memory floor"] == "this device's memory speed is not known"
    steps |= {"device": "cuda", "decode": {**decode, "steps": 0}}
    assert ["kernels of one", "no decode step"] in shown({**FIELDS, "steps": steps})


def test_a_rate_is_shown() -> None:
    rows = {cells[0]: cells[1:] for cells in shown({**FIELDS, "bench": {**FIELDS["bench"], "request_rate": 2.5}})}
    assert rows["requests come"] == ["2.5 a second"]
