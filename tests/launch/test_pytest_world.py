"""The example of docs/examples as its users run it, and what becomes of a test that fails on one rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_infer.launch import mpirun
from tests.source_tree import ROOT

EXAMPLE = ROOT / "docs" / "examples"
BROKEN = """
import pytest

@pytest.mark.mpi
def test_one_rank_fails(world):
    assert world.rank == 0, "only rank 0 is right"

@pytest.mark.mpi
def test_that_needs_all(world):
    assert world.all_min([1]) == [1]
"""


def command(folder: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        *options,
        str(folder),
    ]


def on_two_ranks(folder: Path) -> mpirun.Finished:
    argv = command(folder, "--with-mpi")
    argv[1:1] = ["-m", "mpi4py"]
    env = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    launch = mpirun.command(2, argv, launcher=mpirun.find_launcher(), oversubscribe=True, extra_env=env)
    return mpirun.run(launch, timeout_s=120, capture=True, cwd=str(folder))


def test_the_example_passes_on_two_ranks() -> None:
    pytest.importorskip("pytest_mpi", reason="pip: pytest-mpi is not installed")
    done = on_two_ranks(EXAMPLE)
    assert done.returncode == 0, done.output
    assert done.output.count("2 passed") == 2


def test_without_mpi_the_example_is_skipped() -> None:
    pytest.importorskip("pytest_mpi", reason="pip: pytest-mpi is not installed")
    env = mpirun.scrub(os.environ) | {"PYTHONSAFEPATH": "1"}
    argv = command(EXAMPLE)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stdout
    assert "2 skipped" in done.stdout


def test_a_test_that_fails_on_one_rank_ends_the_launch(tmp_path: Path) -> None:
    pytest.importorskip("pytest_mpi", reason="pip: pytest-mpi is not installed")
    (tmp_path / "conftest.py").write_text((EXAMPLE / "conftest.py").read_text())
    (tmp_path / "test_broken.py").write_text(BROKEN)
    done = on_two_ranks(tmp_path)
    assert done.returncode == 1 and not done.timed_out, done.output
    assert "only rank 0 is right" in done.output
