"""results/*.json -> results.md: one table a benchmark and device; and README's table of decode steps.

Run by `make results`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER.parent / "README.md"
DECODE = FOLDER / "results" / "bench_decode-h200.json"
BEGIN, END = "<!-- decode steps: by `make results` -->", "<!-- end of decode steps -->"
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


def render_decode(result: Mapping[str, Any]) -> str:
    """README's table, of the rows of bench_decode: milliseconds and the share of the floor, a model a line."""
    figures: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        model, *_, size = row["case"].split()
        share = row["floor_us"] / row["ours_us"]
        figures.setdefault(model, {})[size] = f"{row['ours_us'] / 1e3:.3g} ms, {share:.0%}"
    sizes = sorted({size for own in figures.values() for size in own}, key=lambda size: int(size.split("=")[1]))
    words = {size: _words_of(size) for size in sizes}
    lines = [_line(["bf16, dummy weights", *words.values()]), _line(["---"] * (len(sizes) + 1))]
    lines += [_line([model, *(own.get(size, "") for size in sizes)]) for model, own in sorted(figures.items())]
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
    README.write_text(with_table(README.read_text(), render_decode(json.loads(DECODE.read_text()))))
    print(f"wrote {page} and the table in {README}")


if __name__ == "__main__":
    main()
