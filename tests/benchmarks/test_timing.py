"""Timing measures, but no test looks at how long anything took: these look at what the harness would miss."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import timing

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
Pair = tuple[torch.Tensor, torch.Tensor]


def make_pair(device: torch.device) -> Pair:
    return torch.ones(4, 64, device=device), torch.zeros(4, 64, device=device)


def double(pair: Pair) -> Sequence[torch.Tensor]:
    return [torch.mul(pair[0], 2, out=pair[1])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_each_candidate_gets_figures_in_order(device: torch.device) -> None:
    candidates = {"ours": double, "other": double}
    found = timing.compare(
        candidates, lambda idx: make_pair(device), device=device, bytes_per_call=2**30, num_samples=5
    )
    assert list(found) == ["ours", "other"]
    for figures in found.values():
        assert 0 < figures.low_us <= figures.median_us <= figures.high_us


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_row_that_is_never_written_is_found(device: torch.device, num_rows: int) -> None:
    def write_some(pair: Pair) -> Sequence[torch.Tensor]:
        torch.mul(pair[0][:num_rows], 2, out=pair[1][:num_rows])
        return [pair[1]]

    with pytest.raises(timing.BenchmarkError, match="lazy: output 0"):
        timing.compare(
            {"ours": double, "lazy": write_some},
            lambda idx: make_pair(device),
            device=device,
            bytes_per_call=2**30,
            num_samples=1,
        )


def test_an_output_that_can_not_be_poisoned_is_refused() -> None:
    with pytest.raises(timing.BenchmarkError, match="not contiguous"):
        timing.compare(
            {"ours": lambda pair: [pair[0].t()]}, lambda idx: make_pair(CPU), device=CPU, bytes_per_call=2**30
        )


def test_copies_together_exceed_the_cache() -> None:
    assert timing.num_copies(2**20, CPU) * 2**20 >= 2 * 64 * 2**20 or timing.num_copies(2**20, CPU) == 64
    assert timing.num_copies(2**40, CPU) == 2
    assert timing.num_copies(0, CPU) == 64


def test_floor_is_the_slowest_of_reads_copies_and_arithmetic() -> None:
    assert timing.floor_us(read_bytes=4.534e12) == pytest.approx(1e6)
    assert timing.floor_us(copy_bytes=4.26e6, flops=1) == pytest.approx(1.0)
    assert timing.floor_us(read_bytes=1, flops=784.5e12) == pytest.approx(1e6)
    assert timing.floor_us(flops=1453.8e12, number_format="fp8") == pytest.approx(1e6)


def test_results_file_has_the_agreed_form(tmp_path: Path) -> None:
    row = timing.Row(case="bf16 h=16", ours_us=2.0, library="torch", peers={"torch": 3.0}, not_run={"x": "absent"})
    path = timing.write_results("rms_norm", [row], device=CPU, folder=tmp_path)
    assert path.name == "rms_norm-cpu.json"
    result = json.loads(path.read_text())
    assert {"device", "versions", "date", "command"} <= result["meta"].keys()
    assert result["rows"] == [
        {
            "case": "bf16 h=16",
            "ours_us": 2.0,
            "library": "torch",
            "floor_us": None,
            "peers": {"torch": 3.0},
            "not_run": {"x": "absent"},
            "bounds": {},
        }
    ]


def test_a_command_is_told_without_the_folder_of_peers() -> None:
    assert timing._command(["-m", "benchmarks.bench_x", "--peers", "a/b", "many"]) == (
        "python -m benchmarks.bench_x --peers FOLDER many"
    )
    assert timing._command(["-m", "b"]) == "python -m b"
