import os
import subprocess
import sys

import pytest

from dist_infer import __version__
from dist_infer.cli import main as command_line
from dist_infer.errors import CheckpointError, DistInferError, UsageError

HEAVY = ("torch", "mpi4py", "tokenizers", "jinja2", "numpy")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["run"], ["run", "--bogus"]])
def test_help_and_wrong_usage_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; from dist_infer.cli.main import main; code = main(sys.argv[1:]); "
        f"print('\\nheavy:', [name for name in {HEAVY!r} if name in sys.modules], code)"
    )
    done = run_python("-c", script, *arguments)
    expected = 2 if arguments in (["run"], ["run", "--bogus"]) else 0
    assert done.stdout.splitlines()[-1] == f"heavy: [] {expected}", done.stderr


def test_the_check_for_heavy_imports_can_fail() -> None:
    done = run_python("-c", "import sys, numpy, dist_infer.cli.main; print('numpy' in sys.modules)")
    assert done.stdout == "True\n"


def test_as_a_module() -> None:
    done = run_python("-m", "dist_infer", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"dist-infer {__version__}\n", "")
    done = run_python("-m", "dist_infer", "run")
    assert done.returncode == 2
    assert "--prompt TEXT" in done.stderr and "Traceback" not in done.stderr


def test_help_names_every_option_with_unit_or_choice() -> None:
    done = run_python("-m", "dist_infer", "run", "--help")
    for text in ("--max-model-len TOKENS", "--tp RANKS", "--step-timeout SECONDS", "--device <auto|cpu|cuda>"):
        assert text in done.stdout
    assert "75 stopped" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("error", "code", "rank_1_speaks"),
    [
        (UsageError("wrong"), 2, False),
        (CheckpointError("broken file"), 1, True),
        (DistInferError("rank 3 died"), 1, True),
    ],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_errors_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: DistInferError,
    code: int,
    rank_1_speaks: bool,
    rank: str,
) -> None:
    class Command:
        def main(self, *_: object, **__: object) -> int:
            raise error

    monkeypatch.setattr("typer.main.get_command", lambda _: Command())
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    assert command_line.main([]) == code
    speaks = rank == "0" or rank_1_speaks
    assert capsys.readouterr().err == (f"dist-infer: error: {error}\n" if speaks else "")


def test_a_defect_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Command:
        def main(self, *_: object, **__: object) -> int:
            raise RuntimeError("ours")

    monkeypatch.setattr("typer.main.get_command", lambda _: Command())
    with pytest.raises(RuntimeError, match="ours"):
        command_line.main([])


def test_a_closed_output_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.run(
        [sys.executable, "-m", "dist_infer", "run", "--help"], stdout=write_end, stderr=subprocess.PIPE, check=False
    )
    os.close(write_end)
    assert b"Traceback" not in process.stderr


@pytest.mark.parametrize("with_triton", [False, True])
def test_the_end_spares_the_last_walk_unless_triton_would_complain(with_triton: bool) -> None:
    script = (
        "import atexit, gc, sys; from dist_infer.cli.main import main; "
        "atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        f"sys.modules.update(dict.fromkeys({['triton'] * with_triton})); "
        "main(['--version']); print(gc.get_freeze_count() > 0)"
    )
    assert run_python("-c", script).stdout.splitlines()[-2:] == ["False", str(not with_triton)]  # at the end alone
