"""`dist-infer run` on a GPU: with graphs, eagerly, and on two ranks that share it, the same answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_infer.launch import mpirun
from tests.gpu_models import make_real_shaped

pytestmark = pytest.mark.gpu

LIMIT_S = 240.0
PROMPTS = [[(7 * i * i + (3 + row) * i + row) % 131 for i in range(1 + 9 * row)] for row in range(6)]
PROMPTS += [PROMPTS[5][:40], [*PROMPTS[5], 7]]  # what they begin with is in the cache of prefixes by then
OPTIONS = ["--device", "cuda", "--dtype", "float32", "--max-num-tokens", "32", "--max-num-seqs", "5", "--seed", "1"]
OPTIONS += ["--kv-memory-fraction", "0.05"]  # other tests may run on the GPU meanwhile
TWO_RANKS = [["--tp", "2"], ["--tp", "2", "--ep", "1"], ["--dp", "2"], ["--dp", "2", "--ep", "1"]]


@pytest.fixture(scope="module", params=["llama", "qwen3-moe", "deepseek-v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_real_shaped(tmp_path_factory.mktemp("gpu-job") / request.param, request.param)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Of one rank on the CPU in float64."""
    answers, _ = run(model, tmp_path_factory.mktemp("cpu"), 1, ["--device", "cpu", "--dtype", "float64"])
    return answers


def run(model: Path, folder: Path, num_ranks: int, options: list[str]) -> tuple[dict[str, list[int]], str]:
    """The greedy answers by request, and what was logged."""
    lines = [
        {"custom_id": f"r{idx}", "prompt": prompt, "max_tokens": 4 + 2 * idx, "temperature": 0, "ignore_eos": True}
        for idx, prompt in enumerate(PROMPTS)
    ]
    lines = [line | {"return_token_ids": True} for line in lines]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = folder / "out.jsonl"
    program = [sys.executable, "-P", "-m", "dist_infer", "run", "-i", str(folder / "in.jsonl"), "-o", str(output)]
    program += ["--model", str(model), *OPTIONS, *options]
    launch = mpirun.command(
        num_ranks, program, launcher=mpirun.find_launcher(), oversubscribe=True, extra_env={"OMP_NUM_THREADS": "1"}
    )
    with open(folder / "log", "wb") as log:
        process = mpirun.start(launch, output=log)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            mpirun.stop(process)
    text = (folder / "log").read_text()
    assert code == 0, text
    records = [json.loads(line) for line in output.read_text().splitlines()]
    answers = {record["custom_id"]: record["response"]["body"]["choices"][0]["token_ids"] for record in records}
    return answers, text


def test_graphs_and_eager_steps_answer_alike(model: Path, expected: dict[str, list[int]], tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    answers, log = run(model, tmp_path / "graph", 1, ["--summary", str(tmp_path / "summary.json")])
    assert "replayed as graphs of 1, 2, 4, 5" in log
    assert json.loads((tmp_path / "summary.json").read_text())["ranks"][0]["prefix_cached_tokens"] >= 16
    assert answers == expected
    (tmp_path / "eager").mkdir()
    answers, log = run(model, tmp_path / "eager", 1, ["--eager"])
    assert "launched kernel by kernel: --eager" in log
    assert answers == expected


@pytest.mark.parametrize("layout", TWO_RANKS, ids=" ".join)
def test_two_ranks_share_the_gpu(
    model: Path, expected: dict[str, list[int]], tmp_path: Path, layout: list[str]
) -> None:
    answers, log = run(model, tmp_path, 2, ["--share-gpu", *layout])
    assert "the collectives between these ranks can't be captured" in log
    assert answers == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two CUDA devices")
@pytest.mark.parametrize("wire", [[], ["--no-peer-memory"]], ids=["peer memory", "NCCL"])
@pytest.mark.parametrize("layout", TWO_RANKS, ids=" ".join)
def test_two_ranks_have_a_gpu_each(
    model: Path, expected: dict[str, list[int]], tmp_path: Path, layout: list[str], wire: list[str]
) -> None:
    """What they exchange is captured with the rest of a step, also on the stream beside it."""
    answers, log = run(model, tmp_path, 2, [*layout, *wire])
    assert "replayed as graphs of 1, 2, 4, 5" in log and "through peer memory" not in log
    assert answers == expected
