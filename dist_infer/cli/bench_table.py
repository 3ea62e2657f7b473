"""The figures of a benchmark for reading."""

from collections.abc import Mapping
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
    """Two tables: of the whole, and of latencies. `fields` are those of the summary."""
    return Group(_totals(fields), _latencies(fields["latency_s"]))


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


def _figure(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
