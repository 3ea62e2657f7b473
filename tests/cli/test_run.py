import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from dist_infer.cli.environment import Environment
from dist_infer.cli.main import main
from dist_infer.cli.options import RunOptions

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID", "SLURM_STEPID")
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunOptions, Environment]]:
    """What the command hands over; the job itself ends with code 3."""
    taken: list[tuple[RunOptions, Environment]] = []

    def run_job(options: RunOptions, environment: Environment) -> int:
        taken.append((options, environment))
        return 3

    module = ModuleType("dist_infer.cli.job")
    module.run_job = run_job  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dist_infer.cli.job", module)
    for name in (*LAUNCHER_VARIABLES, *JOB_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIST_INFER_CACHE", "/caches")
    return taken


def test_every_option_arrives(jobs: list[tuple[RunOptions, Environment]]) -> None:
    command = (
        "run -i in.jsonl -o out.jsonl --overwrite --model folder --load-format dummy --tp 2 --dp 3 --max-model-len 40 "
        "--max-num-seqs 5 --max-num-tokens 60 --block-size 7 --num-kv-blocks 8 --no-prefix-cache --dtype float64 "
        "--no-peer-memory --quantize nvfp4 --kv-cache-dtype fp8 --batch-invariant "
        "--kernels linear=-triton --kernels mla_attention.context=triton "
        "--device cpu --seed -9 --log-level debug --step-timeout 1.5 --shard 2/3 --max-inflight 9 "
        "--summary sum.json --grace 2.5"
    )
    assert main(command.split()) == 3
    ((options, environment),) = jobs
    assert options == RunOptions(
        input="in.jsonl",
        output="out.jsonl",
        overwrite=True,
        shard=(2, 3),
        model="folder",
        load_format="dummy",
        tp=2,
        dp=3,
        max_model_len=40,
        max_num_seqs=5,
        max_num_tokens=60,
        max_inflight=9,
        block_size=7,
        num_kv_blocks=8,
        prefix_cache=False,
        peer_memory=False,
        dtype="float64",
        quantize="nvfp4",
        kv_cache_dtype="fp8",
        batch_invariant=True,
        kernels=("linear=-triton", "mla_attention.context=triton"),
        device="cpu",
        seed=-9,
        log_level="debug",
        step_timeout_s=1.5,
        summary="sum.json",
        grace_s=2.5,
    )
    assert environment == Environment(launcher=None, cache_dir=Path("/caches"))


def test_defaults_are_those_of_the_options(jobs: list[tuple[RunOptions, Environment]]) -> None:
    main(["run", "--prompt", "one", "--prompt", "two", "--kv-memory-fraction", "0.5"])
    assert jobs[0][0] == RunOptions(prompts=("one", "two"), kv_memory_fraction=0.5)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(
    jobs: list[tuple[RunOptions, Environment]], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'prompt = ["a", "b"]\nmax-num-seqs = 5\nmax_num_tokens = 6\nno-prefix-cache = true\ndtype = "float32"\n'
        "step-timeout = 7\nseed = -3\n"
    )
    assert main(["run", "--max-num-seqs", "9", "--config", str(path)]) == 3
    assert main(["run", "--config", str(path), "--prompt", "c", "--dtype", "float64"]) == 3
    file: dict[str, Any] = {"max_num_tokens": 6, "prefix_cache": False, "step_timeout_s": 7.0, "seed": -3}
    assert jobs[0][0] == RunOptions(prompts=("a", "b"), max_num_seqs=9, dtype="float32", **file)
    assert jobs[1][0] == RunOptions(prompts=("c",), max_num_seqs=5, dtype="float64", **file)


def test_a_value_of_the_file_is_checked_like_one_of_the_command_line(
    jobs: list[tuple[RunOptions, Environment]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    for text, message in (("tp = 0", "--tp is 0"), ('dtype = "int8"', "int8"), ("pt = 1", "unknown key pt")):
        path.write_text(text)
        assert main(["run", "--prompt", "x", "--config", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert jobs == []


def test_the_printed_file_gives_the_same_options(
    jobs: list[tuple[RunOptions, Environment]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "-i", "in", "-o", 'out "1"', "--shard", "2/3", "--tp", "4", "--kv-memory-fraction", "0.25"]
    words += ["--no-prefix-cache"]
    assert main(words) == 3
    assert main([*words, "--print-config"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(capsys.readouterr().out)
    assert main(["run", "--config", str(path)]) == 3
    assert len(jobs) == 2 and jobs[0] == jobs[1]


def test_resume_arrives(jobs: list[tuple[RunOptions, Environment]]) -> None:
    main(["run", "-i", "in", "-o", "out", "--resume"])
    assert jobs[0][0] == RunOptions(input="in", output="out", resume=True)


def test_the_launcher_arrives(jobs: list[tuple[RunOptions, Environment]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    main(["run", "--prompt", "one"])
    launcher = jobs[0][1].launcher
    assert launcher is not None and (launcher.rank, launcher.size) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], 'dist-infer run --prompt "The capital of France is"'),
        (["run", "-i", "x"], "-o FILE"),
        (["run", "--prompt", "x", "--tp", "0"], "--tp is 0"),
        (["run", "--prompt", "x", "--tp", "two"], "--tp"),
        (["run", "--prompt", "x", "--dtype", "int8"], "--dtype"),
        (["run", "--bogus"], "--bogus"),
        (["bogus"], "bogus"),
        ([], "Usage"),
    ],
)
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_wrong_usage_is_code_2_and_told_once(
    jobs: list[tuple[RunOptions, Environment]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
    rank: str | None,
) -> None:
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    told = captured.out + captured.err
    if rank == "1":
        assert told == ""
    else:
        assert message in told
    assert jobs == []


def test_standard_input_under_a_launcher_is_code_2(
    jobs: list[tuple[RunOptions, Environment]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-i", "-", "-o", "-"]) == 3
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert main(["run", "-i", "-", "-o", "-"]) == 2
    assert "Open MPI's mpirun" in capsys.readouterr().err
    assert len(jobs) == 1


def some_words(random: Random) -> list[str]:
    """Words of a command line, most of them right by themselves."""
    names = ("--tp", "--dp", "--seed", "--shard", "--dtype", "--max-inflight", "--step-timeout", "--log-level", "-o")
    values = ("0", "1", "-1", "2/3", "auto", "x", "", "nan", "1e400", str(2**63), "--tp", "-", "float64", "²")
    flags = ("--resume", "--overwrite", "--no-prefix-cache", "--bogus", "-i", "--", "word")
    words = random.choice((["--prompt", "x"], ["-i", "in", "-o", "out"], ["-i", "-"], []))
    for _ in range(random.randrange(4)):
        words = [*words, random.choice(names), random.choice(values)]
        if random.random() < 0.3:
            words = [*words, random.choice(flags)]
    return words


def test_any_options_are_taken_or_refused(
    jobs: list[tuple[RunOptions, Environment]], capsys: pytest.CaptureFixture[str]
) -> None:
    random = Random(0)
    refused = 0
    for _ in range(1000):
        words = some_words(random)
        before = len(jobs)
        code = main(["run", *words])
        assert code == (3 if len(jobs) > before else 2), words
        refused += code == 2
        if code == 2:
            captured = capsys.readouterr()
            assert captured.out + captured.err, words
    assert 100 < refused < 900
