import sys
from pathlib import Path
from types import ModuleType

import pytest

from dist_infer.cli.bench_options import BenchOptions
from dist_infer.cli.environment import Environment
from dist_infer.cli.main import main


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """What the command hands over; the job itself ends with code 75."""
    taken: list[BenchOptions] = []

    def run_bench(options: BenchOptions, environment: Environment) -> int:
        taken.append(options)
        return 75

    module = ModuleType("dist_infer.cli.bench_run")
    module.run_bench = run_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dist_infer.cli.bench_run", module)
    return taken


def test_every_option_arrives(jobs: list[BenchOptions]) -> None:
    command = (
        "bench --num-prompts 3 --input-len 4 --output-len 5 --range-ratio 0.25 --prefix-len 6 --request-rate 1.5 "
        "--max-inflight 7 --warmup 0 --result r.json --model folder --load-format dummy --tp 2 --no-prefix-cache "
        "--no-peer-memory --seed 8 --max-num-seqs 9 --uniform-routing"
    )
    assert main(command.split()) == 75
    assert jobs == [
        BenchOptions(
            num_prompts=3,
            input_len=4,
            output_len=5,
            range_ratio=0.25,
            prefix_len=6,
            request_rate=1.5,
            max_inflight=7,
            warmup=0,
            result="r.json",
            model="folder",
            load_format="dummy",
            tp=2,
            prefix_cache=False,
            peer_memory=False,
            seed=8,
            max_num_seqs=9,
            uniform_routing=True,
        )
    ]


def test_without_options_it_draws_random_prompts_of_a_fixed_seed(jobs: list[BenchOptions]) -> None:
    main(["bench"])
    assert jobs == [BenchOptions(seed=0)]


def test_options_from_a_file_and_back(
    jobs: list[BenchOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--dataset", "d.json", "--request-rate", "2", "--max-num-tokens", "99"]
    assert main(words) == 75
    assert main([*words, "--print-config"]) == 0
    path = tmp_path / "bench.toml"
    path.write_text(capsys.readouterr().out)
    assert main(["bench", "--config", str(path)]) == 75
    assert len(jobs) == 2 and jobs[0] == jobs[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; it must be at least 1"),
        (["--warmup", "-1"], "--warmup is -1; it must be at least 0"),
        (["--range-ratio", "1"], "--range-ratio is 1"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--request-rate", "inf"], "--request-rate is inf"),
        (["--dataset", "d", "--input-len", "5"], "--input-len is for random prompts"),
        (["--dataset", ""], "--dataset is empty"),
        (["--tp", "0"], "--tp is 0"),
        (["--prompt", "x"], "--prompt"),
        (["--dataset-path", "x"], "here it is --dataset"),
    ],
)
def test_wrong_usage_is_code_2(
    jobs: list[BenchOptions], words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert jobs == []
