"""The figures of a benchmark for reading."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

_LATENCIES: Mapping[str, str] = {
    "first_token_from_submission": "time to first token",
    "per_later_token": "time per output token",
    "between_tokens": "inter-token latency",
    "whole_request": "end-to-end latency",
}
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def render(fields: Mapping[str, Any]) -> Group:
    """Tables of the whole, of latencies, and of the steps of rank 0. `fields` are those of the summary.

    A job that was stopped has no figures of steps.
    """
    tables = [_totals(fields), _latencies(fields["latency_s"])]
    if "steps" in fields:
        tables += [_steps(fields["steps"]), _libraries(fields["steps"]["libraries"])]
    return Group(*tables)


def _totals(fields: Mapping[str, Any]) -> Table:
    bench, seconds, rates = fields["bench"], fields["seconds"], fields["per_second"]
    layout = " ".join(f"{name}={size}" for name, size in fields["layout"].items())
    table = Table(title=f"{fields['model']}, {fields['dtype']}, {layout}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rate = bench["request_rate"]
    rows = {
        "outcome": fields["outcome"],
        "dataset": bench["dataset"],
        "requests": f"{fields['requests']['ok']} of {bench['requests']}",
        "requests come": "all at once" if rate is None else f"{rate:g} a second",
        "input tokens": f"{fields['tokens']['prompt']:,}",
        "output tokens": f"{fields['tokens']['output']:,}",
        "seconds": _figure(seconds.get("serve")),
        "requests a second": _figure(rates["requests"]),
        "output tokens a second": _figure(rates["output_tokens"]),
        "all tokens a second": _figure(rates["total_tokens"]),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _latencies(latencies: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table(title="milliseconds")
    table.add_column()
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for key, name in _LATENCIES.items():
        values = (latencies[key][column] for column in _COLUMNS)
        table.add_row(name, *(_figure(None if value is None else value * 1e3) for value in values))
    return table


def _steps(steps: Mapping[str, Any]) -> Table:
    decode, others, profile = steps["decode"], steps["others"], steps["profile"]
    on_gpu = steps["device"] == "cuda"
    table = Table(title="steps of rank 0", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "decode steps": f"{decode['steps']:,}",
        "of them as graphs": f"{decode['as_graphs']:,}",
        "sequences of one": _figure(decode["sequences_mean"]),
        "milliseconds of one": _figure(_in_ms(decode["busy_us"]["p50"])),
        f"microseconds of the {'GPU' if on_gpu else 'model'} between two": _figure(decode["gap_us"]["p50"]),
        f"{'GPU' if on_gpu else 'model'} busy": _percent(decode["busy_share"]),
        "of the memory floor": _percent(decode["floor_share"], "this device's memory speed is not known"),
        "kernels of one": f"{profile['num_kernels']:,}" if profile else _why_no_kernels(steps),
        "other steps": f"{others['steps']:,}",
        "tokens of one": _figure(others["tokens_mean"]),
        "milliseconds of such a one": _figure(_in_ms(others["busy_us"]["p50"])),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _why_no_kernels(steps: Mapping[str, Any]) -> str:
    if steps["device"] != "cuda":
        return "only on a GPU"
    return "the profiler saw none" if steps["decode"]["steps"] else "no decode step"


def _libraries(libraries: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title="libraries", show_header=False)
    table.add_column()
    table.add_column()
    for op, names in sorted(libraries.items()):
        table.add_row(op, ", ".join(names))
    return table


def _in_ms(value_us: float | None) -> float | None:
    return None if value_us is None else value_us / 1e3


def _percent(share: float | None, why_not: str = "-") -> str:
    return why_not if share is None else f"{100 * share:.3g} %"


def _figure(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
