"""The page shows what the files hold, and picks the fastest peer."""

import json
from typing import Any

import pytest

from benchmarks.results_table import BEGIN, DECODE, END, HEADER, README, START, render, render_models, with_table

META: dict[str, Any] = {
    "device": "NVIDIA H200",
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-31",
    "command": "python -m benchmarks.bench_rms_norm",
    "empty_kernel_us": 1.25,
}


def row(**fields: Any) -> dict[str, Any]:
    empty = {
        "case": "c",
        "ours_us": 2.0,
        "library": "triton",
        "floor_us": None,
        "peers": {},
        "not_run": {},
        "bounds": {},
    }
    return empty | fields


def cells(page: str, case: str) -> dict[str, str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {case} |"))
    return dict(zip(HEADER, (cell.strip() for cell in line.strip("|").split(" | ")), strict=True))


def test_a_row_names_its_fastest_peer_and_its_part_of_the_floor() -> None:
    rows = [
        row(case="fast", floor_us=1.0, peers={"slow": 9.0, "near": 3.0}, bounds={"memcpy": 1.5}),
        row(case="alone", ours_us=1234.5, not_run={"gone": "not installed"}),
    ]
    page = render({"rms_norm-h200": {"meta": META, "rows": rows}})
    fast, alone = cells(page, "fast"), cells(page, "alone")
    assert (fast["peer"], fast["best peer µs"], fast["speed-up"], fast["of floor"]) == ("near", "3", "1.50x", "50%")
    assert fast["bounds µs"] == "memcpy 1.5"
    assert (alone["peer"], alone["speed-up"], alone["ours µs"]) == ("", "", "1234")
    assert alone["not run"] == "gone (not installed)"


def test_sections_are_sorted_and_say_how_they_were_made() -> None:
    page = render({name: {"meta": META, "rows": [row()]} for name in ("b-cpu", "a-h200")})
    assert page.index("## a-h200") < page.index("## b-cpu")
    assert "NVIDIA H200, 2026-01-31; torch 2.13.0; `python -m benchmarks.bench_rms_norm`" in page
    assert "an empty kernel takes 1.25 µs" in page


def test_whole_models_as_a_table() -> None:
    rows = [
        row(case="b bf16 tp=1 context=1024 b=64", ours_us=7000.0, floor_us=3500.0),
        row(
            case="a bf16 tp=1 context=1024 b=1",
            ours_us=4495.2,
            floor_us=3340.1,
            bounds={"GPU busy": 4490.0, "gap before the next step": 9.0},
        ),
        row(case="a bf16 tp=1 prefill=8192", ours_us=219161.0, floor_us=168190.0),
    ]
    starts = [row(case="a first token", ours_us=21.4e6), row(case="c first token", ours_us=9e6)]
    words = "decode step, batch 1 | decode step, batch 64 | prefill of 8,192 tokens | gap between steps, batch 1"
    assert render_models({"rows": rows}, {"rows": starts}).splitlines() == [
        f"| bf16, dummy weights | {words} | launch to first token |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a | 4.5 ms, 74% |  | 219 ms, 77% | 9 µs, 0.2% | 21 s |",
        "| b |  | 7 ms, 50% |  |  |  |",
        "| c |  |  |  |  | 9 s |",
    ]


def test_readme_has_the_table_of_the_results() -> None:
    page = README.read_text()
    table = render_models(json.loads(DECODE.read_text()), json.loads(START.read_text()))
    assert with_table(page, table) == page, "run `make results`"


def test_a_page_without_marks_is_refused() -> None:
    assert with_table(f"x {BEGIN} old {END} y", "new") == f"x {BEGIN}\nnew\n{END} y"
    with pytest.raises(ValueError, match="has no"):
        with_table(f"x {BEGIN} y", "new")
