"""What keeps mpirun from starting ranks, and that mpirun does refuse there, for real."""

import os
import subprocess
from collections.abc import Callable, Mapping

import pytest

from dist_infer.launch import host_checks
from dist_infer.launch.host_checks import HOST_CHECKS, Host, check_host_name, check_root, check_slots, check_ssh
from dist_infer.launch.mpirun import Launcher, find_launcher, num_cores, scrub
from dist_infer.launch.preflight import Problem

OPEN_MPI_5 = Launcher(path="/x/mpirun", family="openmpi", major=5)
OPEN_MPI_4 = Launcher(path="/x/mpirun", family="openmpi", major=4)
MPICH = Launcher(path="/x/mpirun", family="mpich", major=5)
ROOT_ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
EMPTY_PATH = {"PATH": "/nowhere"}

Find = Callable[[Host], Problem | None]


def host(launcher: Launcher | None, env: Mapping[str, str], **known: object) -> Host:
    defaults: dict[str, object] = {"is_root": False, "name_resolves": True}
    return Host(launcher=launcher, env=env, **(defaults | known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("find", "where", "what", "fix"),
    [
        (check_root, host(OPEN_MPI_5, {}, is_root=True), "refuses to run as root", "export OMPI_ALLOW_RUN_AS_ROOT=1"),
        (check_slots, host(OPEN_MPI_5, {}, num_ranks=3), "has 2 slots", "mpirun --oversubscribe --bind-to none -n 3"),
        (check_ssh, host(OPEN_MPI_4, EMPTY_PATH), "neither ssh nor rsh", "export OMPI_MCA_plm=isolated"),
        (check_host_name, host(MPICH, {}, name_resolves=False), "has no address", ">> /etc/hosts"),
    ],
)
def test_a_problem_comes_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, find: Find, where: Host, what: str, fix: str
) -> None:
    monkeypatch.setattr(host_checks, "num_cores", lambda: 2)
    problem = str(find(where))
    assert what in problem and fix in problem


@pytest.mark.parametrize(
    "where",
    [
        host(None, {}, is_root=True, num_ranks=3),
        host(MPICH, EMPTY_PATH, is_root=True, num_ranks=3),
        host(OPEN_MPI_5, ROOT_ALLOWED | EMPTY_PATH, is_root=True, num_ranks=2),
        host(OPEN_MPI_4, EMPTY_PATH | {"OMPI_MCA_plm": "isolated"}),
        host(OPEN_MPI_4, EMPTY_PATH | {"SLURM_JOB_ID": "1"}, num_ranks=3),
        host(OPEN_MPI_5, {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}, num_ranks=3),
    ],
)
def test_where_nothing_is_wrong_nothing_is_found(monkeypatch: pytest.MonkeyPatch, where: Host) -> None:
    monkeypatch.setattr(host_checks, "num_cores", lambda: 2)
    assert [name for name, find in HOST_CHECKS if find(where) is not None] == []


def test_open_mpi_does_refuse_where_a_problem_is_found_and_not_with_its_fix() -> None:
    launcher = find_launcher()
    if launcher.family != "openmpi" or os.geteuid() != 0:
        pytest.skip("host: needs root and Open MPI's mpirun")
    plain = scrub(os.environ)
    assert mpirun_code(launcher, plain, 1) != 0 and check_root(Host(launcher=launcher, env=plain)) is not None
    allowed = plain | ROOT_ALLOWED
    assert mpirun_code(launcher, allowed, 1) == 0 and check_root(Host(launcher=launcher, env=allowed)) is None
    many = num_cores() + 1
    assert mpirun_code(launcher, allowed, many) != 0
    assert check_slots(Host(launcher=launcher, env=allowed, num_ranks=many)) is not None
    assert mpirun_code(launcher, allowed, many, "--oversubscribe", "--bind-to", "none") == 0


def mpirun_code(launcher: Launcher, env: Mapping[str, str], num_ranks: int, *flags: str) -> int:
    argv = [launcher.path, *flags, "-n", str(num_ranks), "true"]
    return subprocess.run(argv, env=dict(env), capture_output=True, timeout=60, check=False).returncode
