import pytest

from dist_infer.cli.arguments import settings
from dist_infer.cli.bench import bench
from dist_infer.cli.main import main
from dist_infer.cli.run import run
from dist_infer.cli.spellings import _OURS, explain_unknown

KNOWN = [setting.spelling for setting in settings(run)]
OF_BENCH = [setting.spelling for setting in settings(bench)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size: here it is --tp"),
        (["--tensor_parallel_size=2"], "--tensor_parallel_size: here it is --tp"),
        (["-tp", "2"], "-tp: here it is --tp"),
        (["--prompt", "x", "--max_batch_size", "4"], "--max_batch_size: here it is --max-num-seqs"),
        (["--gpu-memory-utilization", "0.9"], "here it is --kv-memory-fraction"),
        (["--max_num_seqs", "4"], "--max_num_seqs: here it is spelt --max-num-seqs"),
        (["--trust-remote-code"], "code of a checkpoint is never run"),
        (["--pp_size", "2"], "a model is cut by --tp and --ep only"),
        (["--enforce-eager"], "here it is --eager"),
        (["--rdzv_endpoint=h:1"], "start the ranks by mpirun or srun"),
    ],
)
def test_spellings_of_others(words: list[str], told: str) -> None:
    assert told in str(explain_unknown(words, KNOWN))


@pytest.mark.parametrize("words", [[], ["--bogus"], ["word", "tensor-parallel-size"], ["--tp", "2"]])
def test_anything_else_is_left_to_the_parser(words: list[str]) -> None:
    assert explain_unknown(words, KNOWN) is None


def test_every_spelling_leads_to_an_option_that_is_there() -> None:
    assert {name for ours in _OURS.values() for name in ours} <= {*KNOWN, *OF_BENCH}
    assert not set(_OURS) & set(KNOWN)
    assert set(_OURS) & set(OF_BENCH) == {"--dataset"}


@pytest.mark.parametrize(
    ("word", "run_tells", "bench_tells"),
    [
        ("--dataset-path", "--input", "--dataset"),
        ("--output-json", "--summary", "--result"),
        ("--dataset", "--input", None),
        ("--num_requests", None, "--num-prompts"),
        ("--random-input-len", None, "--input-len"),
        ("--dataset-name", "the file says", "the file says"),
    ],
)
def test_each_command_names_its_own(word: str, run_tells: str | None, bench_tells: str | None) -> None:
    for known, told in ((KNOWN, run_tells), (OF_BENCH, bench_tells)):
        hint = explain_unknown([word], known)
        assert hint is None if told is None else hint is not None and told in hint


@pytest.mark.parametrize("words", [["--max_batch_size", "4", "--prompt", "x"], ["--prompt", "x", "-tp", "2"]])
def test_the_command_line_says_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert "here it is --" in capsys.readouterr().err


def test_a_prompt_may_read_like_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--prompt", "--max_batch_size", "--bogus"]) == 2
    assert "--bogus" in capsys.readouterr().err
