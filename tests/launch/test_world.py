"""Opening a world, deciding together, leaving in each of the ways."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_infer.comm.mesh import Mesh
from dist_infer.errors import ExitCode, UsageError
from dist_infer.launch import mpirun
from dist_infer.launch.failure import VotedError
from dist_infer.launch.world import World

PROGRAM = Path(__file__).parent / "world_program.py"


@pytest.mark.ranks(1, 2)
def test_every_rank_knows_its_place(world: World) -> None:
    reports = world.vote("places", None, {"rank": world.rank, "local": world.local_rank, "host": world.host})
    assert [report["rank"] for report in reports] == list(range(world.size))
    assert sorted(report["local"] for report in reports) == list(range(world.local_size))  # all on this host
    assert world.local_size == world.size
    assert world.device == torch.device("cpu")
    assert (world.store is None) == (world.size == 1)


@pytest.mark.ranks(2)
def test_the_store_listens_on_loopback_only_on_one_host(world: World) -> None:
    assert world.store.host == "127.0.0.1"


@pytest.mark.ranks(1, 2)
def test_vote_names_each_failed_rank_on_all_ranks(world: World) -> None:
    for repeat in range(6):
        failing = {repeat % world.size, 0} if repeat % 2 else {repeat % world.size}
        error = ValueError(f"no luck {repeat}") if world.rank in failing else None
        with pytest.raises(VotedError) as caught:
            world.vote("load", error)
        for rank in failing:
            assert f"rank {rank} (host {world.host}" in str(caught.value)
        assert f"ValueError: no luck {repeat}" in str(caught.value)
        assert str(caught.value).startswith("load") and "Traceback" not in str(caught.value).splitlines()[0]
        assert caught.value.exit_code == ExitCode.ERROR
        assert caught.value.speaker == (world.rank == 0)
        assert world.vote("again", None, {"repeat": repeat}) == [{"repeat": repeat}] * world.size


@pytest.mark.ranks(1, 2)
def test_one_curable_error_on_all_ranks_is_one_message(world: World) -> None:
    with pytest.raises(VotedError) as caught:
        world.vote("options", UsageError("--tp 3: use 1 or 2"))
    assert str(caught.value) == "--tp 3: use 1 or 2"
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.ranks(1, 2)
def test_all_min(world: World) -> None:
    assert world.all_min([world.rank + 10, 10 - world.rank, 7]) == [10, 11 - world.size, 7]


@pytest.mark.ranks(1, 2)
def test_communicators_are_opened_once_a_mesh(world: World) -> None:
    mesh = Mesh.create(world=world.size, rank=world.rank)
    opened = world.communicators(mesh)
    assert world.communicators(Mesh.create(world=world.size, rank=world.rank)) is opened
    summed = opened.world.all_reduce(torch.full((3,), float(world.rank + 1)))
    assert summed.tolist() == [world.size * (world.size + 1) / 2] * 3


def run_alone(code: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-c", f"import sys; from dist_infer.launch.world import run_world; {code}"]
    env = mpirun.scrub(os.environ)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_launcher_there_is_no_mpi() -> None:
    done = run_alone("code = run_world(lambda world: 3); assert 'mpi4py' not in sys.modules; sys.exit(code)")
    assert done.returncode == 3, done.stderr


def test_an_error_in_a_world_of_one_is_shown_and_is_code_1() -> None:
    done = run_alone("sys.exit(run_world(lambda world: 1 // 0))")
    assert done.returncode == 1
    assert "rank 0" in done.stderr and "ZeroDivisionError" in done.stderr and "Traceback" in done.stderr


def test_a_wrong_launch_is_refused_before_mpi_is_loaded() -> None:
    with pytest.raises(UsageError, match="srun --mpi=pmix"):
        World.open(env={"SLURM_NTASKS": "4"})
    assert "mpi4py.MPI" not in sys.modules


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("voted", 2, "dist-infer: options: rank 1 (host "),
        ("leftovers", 75, ""),
        ("no farewell", 1, "left early: its program ended without a farewell"),
    ],
)
def test_ways_to_leave(how: str, code: int, says: str) -> None:
    """The port that torch would take from the environment is taken; the job's own is the kernel's choice."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        argv = [sys.executable, str(PROGRAM), how]
        launch = mpirun.command(2, argv, launcher=mpirun.find_launcher(), extra_env=env)
        done = mpirun.run(launch, timeout_s=60, capture=True)
    assert done.returncode == code, done.output
    assert says in done.output
    assert done.output.count("dist-infer: ") == (1 if says else 0), done.output
