"""results/*.json -> results.md: one table a benchmark and device; and README's table of whole models on a GPU.

Run by `make results`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
DECODE = FOLDER / "results" / "bench_decode-h200.json"
START = FOLDER / "results" / "bench_start_gpu-h200.json"
BEGIN, END = "<!-- whole models: by `make results` -->", "<!-- end of whole models -->"
HEADER = (
    "case",
    "ours µs",
    "library",
    "floor µs",
    "of floor",
    "best peer µs",
    "peer",
    "speed-up",
    "bounds µs",
    "not run",
)


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page. `results` maps the stem of a results file to its contents."""
    parts = ["# Results", "Made by `make results` from results/*.json: change those, not this page."]
    parts += [_section(stem, results[stem]) for stem in sorted(results)]
    return "\n\n".join(parts) + "\n"


def render_models(decode: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """README's table, a model a line, of the rows of bench_decode and bench_start_gpu.

    Times with their share of the floor, the gap between two steps at batch 1, and the time from launch to first token.
    """
    figures: dict[str, dict[str, str]] = {}
    gaps: dict[str, str] = {}
    for row in decode["rows"]:
        model, *_, size = row["case"].split()
        share = row["floor_us"] / row["ours_us"]
        figures.setdefault(model, {})[size] = f"{row['ours_us'] / 1e3:.3g} ms, {share:.0%}"
        if size == "b=1":
            gap_us = row["bounds"]["gap before the next step"]
            gaps[model] = f"{_us(gap_us)} µs, {gap_us / row['ours_us']:.1%}"
    starts = {row["case"].split()[0]: f"{row['ours_us'] / 1e6:.0f} s" for row in start["rows"]}
    sizes = sorted({size for own in figures.values() for size in own}, key=lambda size: int(size.split("=")[1]))
    head = ["bf16, dummy weights", *map(_words_of, sizes), "gap between steps, batch 1", "launch to first token"]
    lines = [_line(head), _line(["---"] * len(head))]
    for model in sorted({*figures, *starts}):
        own = figures.get(model, {})
        cells = [model, *(own.get(size, "") for size in sizes), gaps.get(model, ""), starts.get(model, "")]
        lines.append(_line(cells))
    return "\n".join(lines)


def _words_of(size: str) -> str:
    """`b=64` or `prefill=8192` as the head of a column."""
    kind, number = size.split("=")
    return f"prefill of {int(number):,} tokens" if kind == "prefill" else f"decode step, batch {number}"


def with_table(page: str, table: str) -> str:
    """The page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or not after:
        raise ValueError(f"the page has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _section(stem: str, result: Mapping[str, Any]) -> str:
    meta = result["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    about = f"{meta['device']}, {meta['date']}; {versions}; `{meta['command']}`"
    if meta.get("empty_kernel_us") is not None:
        about += f"; an empty kernel takes {_us(meta['empty_kernel_us'])} µs"
    rows = [_line(HEADER), _line(["---"] * len(HEADER)), *(_line(_cells(row)) for row in result["rows"])]
    return f"## {stem}\n\n{about}\n\n" + "\n".join(rows)


def _cells(row: Mapping[str, Any]) -> list[str]:
    ours, floor = row["ours_us"], row.get("floor_us")
    peer, best = min(row["peers"].items(), key=lambda entry: float(entry[1]), default=("", None))
    return [
        row["case"],
        _us(ours),
        row["library"],
        _us(floor),
        f"{floor / ours:.0%}" if floor else "",
        _us(best),
        peer,
        f"{best / ours:.2f}x" if best is not None else "",
        ", ".join(f"{name} {_us(value)}" for name, value in row["bounds"].items()),
        ", ".join(f"{name} ({reason})" for name, reason in row["not_run"].items()),
    ]


def _us(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _line(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Write the page and README's table anew."""
    files = (FOLDER / "results").glob("*.json")
    page = FOLDER / "results.md"
    page.write_text(render({path.stem: json.loads(path.read_text()) for path in files}))
    table = render_models(json.loads(DECODE.read_text()), json.loads(START.read_text()))
    README.write_text(with_table(README.read_text(), table))
    print(f"wrote {page} and the table in {README}")


if __name__ == "__main__":
    main()
