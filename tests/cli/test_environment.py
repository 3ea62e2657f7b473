from pathlib import Path

import pytest

from dist_infer.cli.environment import Environment, Launcher, read_launcher
from dist_infer.errors import UsageError


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({}, None),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "3"},
            Launcher(name="Open MPI's mpirun", rank=3, size=4),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launcher(name="mpiexec", rank=0, size=2)),
        ({"PMIX_RANK": "1"}, Launcher(name="a PMIx launcher", rank=1, size=None)),
        (
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},
            Launcher(name="srun", rank=2, size=4),
        ),
        # the shell of salloc, and a batch script
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        ({"OMPI_COMM_WORLD_RANK": "x"}, None),
    ],
)
def test_launcher(env: dict[str, str], launcher: Launcher | None) -> None:
    assert read_launcher(env) == launcher


def test_the_job_of_the_batch_system() -> None:
    home = {"HOME": "/home/u"}
    assert Environment.read(home).job_id is None
    assert Environment.read(home | {"SLURM_JOB_ID": "7"}).job_id == "7"
    assert Environment.read(home | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}).job_id == "7 restart 2"
    assert Environment.read(home | {"SLURM_JOB_ID": "", "PBS_JOBID": "9.server"}).job_id == "9.server"


def test_rank_0_speaks_for_all() -> None:
    home = {"HOME": "/home/u"}
    assert Environment.read(home).speaks
    assert Environment.read(home | {"PMI_RANK": "0"}).speaks
    assert not Environment.read(home | {"PMI_RANK": "1"}).speaks


@pytest.mark.parametrize(
    ("env", "cache_dir"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/dist-infer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x"}, "/x/dist-infer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}, "/home/u/.cache/dist-infer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": ""}, "/home/u/.cache/dist-infer"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/x", "DIST_INFER_CACHE": "/c"}, "/c"),
        ({"DIST_INFER_CACHE": "/c"}, "/c"),
    ],
)
def test_cache_folder(env: dict[str, str], cache_dir: str) -> None:
    assert Environment.read(env).cache_dir == Path(cache_dir)


def test_a_relative_cache_folder_stays_where_the_job_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Environment.read({"DIST_INFER_CACHE": "cache"}).cache_dir == tmp_path / "cache"
    assert not (tmp_path / "cache").exists()


def test_no_place_for_caches_is_named() -> None:
    with pytest.raises(UsageError, match="DIST_INFER_CACHE"):
        Environment.read({})


def test_libraries_find_their_variables() -> None:
    environment = Environment(launcher=None, cache_dir=Path("/cache"))
    env: dict[str, str] = {}
    environment.export(env)
    assert env == {
        "TRITON_CACHE_DIR": "/cache/triton",
        "CUTE_DSL_CACHE_DIR": "/cache/cute",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    chosen = {"TRITON_CACHE_DIR": "/mine", "CUTE_DSL_CACHE_DIR": "/mine", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    env = dict(chosen)
    environment.export(env)
    assert env == chosen
