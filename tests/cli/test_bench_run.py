"""`dist-infer bench` as a user starts it, on a tiny model: two ranks under mpirun, and alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_infer.errors import ExitCode
from dist_infer.launch import mpirun
from tests.tiny_models import make_tiny_llama

PROGRAM = [sys.executable, "-P", "-m", "dist_infer", "bench"]
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny-llama", 4, 2)


def run_bench(num_ranks: int, arguments: list[str]) -> tuple[int, str]:
    """Exit code and all that was shown."""
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    launch = mpirun.command(
        num_ranks, [*PROGRAM, *arguments], launcher=mpirun.find_launcher(), oversubscribe=True, extra_env=env
    )
    finished = subprocess.run(
        launch.argv, env=launch.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    return finished.returncode, finished.stdout


def test_random_prompts_in_two_groups(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "figures.json"
    sizes = ["--num-prompts", "5", "--input-len", "20", "--output-len", "7", "--warmup", "3"]
    options = ["--model", str(model), "--load-format", "dummy", "--dp", "2", "--request-rate", "500"]
    code, shown = run_bench(2, [*sizes, *options, "--result", str(result)])
    assert code == ExitCode.DONE, shown
    assert "5 of 5" in shown and "time to first token" in shown
    fields = json.loads(result.read_text())
    assert fields["tokens"] == {"prompt": 100, "output": 35}, "without the warm-up"
    assert fields["bench"]["uniform_routing"] is False
    assert fields["bench"]["input_tokens"] == {"mean": 20, "min": 20, "max": 20}
    assert fields["latency_s"]["first_token_from_submission"]["count"] == 5
    assert fields["latency_s"]["between_tokens"]["count"] == 30
    assert fields["latency_s"]["whole_request"]["count"] == 5
    assert {"load", "warm up", "serve"} <= set(fields["seconds"])
    assert fields["per_second"]["output_tokens"] == pytest.approx(35 / fields["seconds"]["serve"])
    assert [rank["rank"] for rank in fields["ranks"]] == [0, 1]
    steps = fields["steps"]
    assert "steps of rank 0" in shown and "only on a GPU" in shown
    assert (steps["device"], steps["profile"], steps["decode"]["floor_share"]) == ("cpu", None, None)
    assert steps["decode"]["steps"] == steps["decode"]["busy_us"]["count"] > 0 == steps["decode"]["as_graphs"]
    assert 0 < steps["decode"]["busy_share"] < 1
    assert steps["libraries"]["rotary"] == steps["libraries"]["sample"] == ["torch"]


@pytest.mark.gpu
def test_steps_of_a_gpu(model: Path, tmp_path: Path) -> None:
    result = tmp_path / "figures.json"
    sizes = ["--num-prompts", "6", "--input-len", "20", "--output-len", "30", "--kv-memory-fraction", "0.05"]
    code, shown = run_bench(1, [*sizes, "--model", str(model), "--dtype", "bfloat16", "--result", str(result)])
    assert code == ExitCode.DONE, shown
    steps = json.loads(result.read_text())["steps"]
    decode, profile = steps["decode"], steps["profile"]
    assert steps["device"] == "cuda" and decode["steps"] == decode["as_graphs"] > 20
    assert 5 < decode["sequences_mean"] <= 6 and 0 < decode["busy_share"] < 1
    assert 0 < profile["busy_us"] <= profile["span_us"]
    assert profile["num_kernels"] == sum(
        kernel["launches"] for kernel in profile["kernels"] if not kernel["name"].startswith("Mem")
    )
    assert 10 < profile["num_kernels"] < 200
    on_h200 = "H200" in torch.cuda.get_device_name()
    assert 0 < decode["floor_share"] < 1 if on_h200 else decode["floor_share"] is None
    assert steps["libraries"]["sample"] == ["triton"]


def alone(arguments: list[str]) -> Any:
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=mpirun.scrub(os.environ)
    )


def test_lines_of_a_file_alone(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [{"task_id": idx, "input_ids": [1, 2, 3 + idx], "output_tokens": 4 + idx} for idx in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    finished = alone(["--dataset", str(path), "--model", str(model), "--warmup", "0"])
    assert finished.returncode == ExitCode.DONE, finished.stderr
    rows = {
        cells[1].strip(): cells[2].strip() for line in finished.stdout.splitlines() if (cells := line.split("│"))[2:]
    }
    assert (rows["requests"], rows["output tokens"]) == ("3 of 3", "15")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input-len", "600"], "--input-len and --output-len: the prompt has 600 tokens"),
        (["--uniform-routing"], "--uniform-routing is for models with experts"),
    ],
)
def test_what_the_model_does_not_allow_is_wrong_usage(model: Path, words: list[str], message: str) -> None:
    finished = alone([*words, "--model", str(model), "--load-format", "dummy"])
    assert finished.returncode == ExitCode.USAGE, finished.stderr
    assert message in finished.stderr


def test_experts_are_dealt_evenly(tmp_path: Path) -> None:
    model = pytest.importorskip("tests.tiny_families").make_tiny(tmp_path / "mixtral", "mixtral")
    sizes = ["--num-prompts", "2", "--input-len", "5", "--output-len", "3", "--uniform-routing"]
    finished = alone([*sizes, "--model", str(model), "--load-format", "dummy"])
    assert finished.returncode == ExitCode.DONE, finished.stderr
    assert "2 of 2" in finished.stdout
