"""The page shows what the files hold, and picks the fastest peer."""

from typing import Any

from benchmarks.results_table import HEADER, render

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
