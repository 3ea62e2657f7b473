"""Checks of the surroundings, each with the fix: `run` refuses to start on the first that fails, `doctor` prints all.

A check looks at what is known so far and finds nothing wrong with what is not known yet, so the same list is gone
through before MPI is loaded, before it is initialised and after. What keeps an mpirun from starting ranks in the first
place is in launch/host_checks.py.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from dist_infer.errors import UsageError
from dist_infer.launch.slurm_env import SlurmEnv

LauncherKind = Literal["none", "openmpi", "pmi", "pmix"]

SHM_BYTES_PER_RANK = (
    16 << 20
)  # what Open MPI reserves; MPICH takes a third of it and dies of SIGBUS where it is missing
_SHM = "/dev/shm"
_DEVICE_NAME = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[\w/-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """What a launcher has put into the environment of this process."""

    kind: LauncherKind
    rank: int = 0  # where it is not told
    size: int | None = None  # None where it is not told
    local_size: int | None = None  # ranks of this host; None where it is not told
    rank_variable: str = ""  # which holds the rank

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Self:
        """Open MPI's mpirun, then PMI (MPICH's mpirun, srun --mpi=pmi2), then PMIx (srun --mpi=pmix)."""
        slurm = SlurmEnv.read(env)
        if "OMPI_COMM_WORLD_SIZE" in env:
            kind: LauncherKind = "openmpi"
            rank, size, local_size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
        elif "PMI_RANK" in env:
            kind, rank, size, local_size = "pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"
        elif "PMIX_RANK" in env:
            kind, rank, size, local_size = "pmix", "PMIX_RANK", "", ""
        else:
            return cls(kind="none")
        told = slurm.num_tasks if kind == "pmix" and slurm.in_step else _number(env, size)
        here = _number(env, local_size)
        here = slurm.local_size if here is None and kind != "openmpi" else here
        return cls(kind=kind, rank=_number(env, rank) or 0, size=told, local_size=here, rank_variable=rank)


def _number(env: Mapping[str, str], name: str) -> int | None:
    return int(env[name]) if env.get(name, "").isdigit() else None


def _free_shm_bytes() -> int | None:
    try:
        return os.statvfs(_SHM).f_bavail * os.statvfs(_SHM).f_frsize
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is known of this process's surroundings; None: not yet, or not to be had."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    device: Literal["auto", "cpu", "cuda"] = "auto"  # that the user asks for
    free_shm_bytes: int | None = field(default_factory=_free_shm_bytes)
    mpi_library: str | None = None  # what MPI_Get_library_version says
    world_size: int | None = None
    local_size: int | None = None  # ranks that share this host's memory, as MPI says

    @property
    def launcher(self) -> LauncherEnv:
        """The launcher of this process."""
        return LauncherEnv.read(self.env)

    @property
    def slurm(self) -> SlurmEnv:
        """The Slurm job of this process."""
        return SlurmEnv.read(self.env)

    @property
    def is_open_mpi(self) -> bool:
        """The MPI library is Open MPI (or one built on it)."""
        return "Open MPI" in (self.mpi_library or "")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the command or setting that cures it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    find: Callable[[Surroundings], Problem | None]


def check_launcher(around: Surroundings) -> Problem | None:
    """Variables of a launcher that did not start this process: MPI_Init would fail, hang, or make worlds of one."""
    env, kind = around.env, around.launcher.kind
    if kind == "pmix" and not around.slurm.in_step:
        left, starter = "PMIX_RANK", "neither Open MPI's mpirun nor srun"
    elif kind == "openmpi" and "PMIX_RANK" not in env:
        left, starter = "OMPI_COMM_WORLD_SIZE", "not Open MPI's mpirun"
    elif kind == "pmi" and (fd := _number(env, "PMI_FD")) is not None and not _is_open(fd):
        left, starter = "PMI_RANK", "not MPICH's mpirun"
    else:
        return None
    return Problem(
        f"{left} is set, but {starter} started this process",
        "start it by `mpirun -n 2 dist-infer ...` or `srun --mpi=pmix -n 2 dist-infer ...`; "
        f"if the variable is left over in this shell: `env -u {left} dist-infer ...`",
    )


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def check_slurm_tasks(around: Surroundings) -> Problem | None:
    """A Slurm job of several tasks whose processes would each be a world of one."""
    slurm = around.slurm
    if around.launcher.kind != "none" or slurm.num_tasks < 2:
        return None
    if slurm.in_step:
        return Problem(
            f"srun started {slurm.num_tasks} tasks without MPI, so each would be a world of one",
            "start them by `srun --mpi=pmix dist-infer ...` (Open MPI) or `srun --mpi=pmi2 dist-infer ...` (MPICH); "
            "`srun --mpi=list` shows what this cluster has",
        )
    return Problem(
        f"this Slurm job has {slurm.num_tasks} tasks, but the process was started without srun or mpirun",
        "start it by `srun --mpi=pmix dist-infer ...` or `mpirun dist-infer ...`; "
        "for one process on purpose, or if the variable is left over: `env -u SLURM_NTASKS dist-infer ...`",
    )


def check_mpi4py(around: Surroundings) -> Problem | None:
    """A launcher, but no mpi4py."""
    if around.launcher.kind == "none" or importlib.util.find_spec("mpi4py") is not None:
        return None
    return Problem("an MPI launcher started this process, but mpi4py is not installed", "pip install 'dist-infer[mpi]'")


def check_visible_devices(around: Surroundings) -> Problem | None:
    """CUDA reads CUDA_VISIBLE_DEVICES up to the first name that it doesn't know, and sees nothing if one is twice."""
    value = around.env.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in value.split(",")]
    if around.device == "cpu" or names in ([""], ["-1"], ["NoDevFiles"]):
        return None
    wrong = next((name for name in names if not _DEVICE_NAME.fullmatch(name)), None)
    wrong = wrong if wrong is not None else next((name for name in names if names.count(name) > 1), None)
    mixed = len({name.isdigit() for name in names}) > 1
    if wrong is None and not mixed:
        return None
    what = "mixes numbers and UUIDs" if wrong is None else f"names {wrong!r}, which is no device or there twice"
    return Problem(
        f"CUDA_VISIBLE_DEVICES={value} {what}",
        "write numbers (0,1) or UUIDs as `nvidia-smi -L` shows them (GPU-...), each once; "
        "unset it to see all GPUs, or use --device cpu",
    )


def check_shared_memory(around: Surroundings) -> Problem | None:
    """MPI and NCCL put what ranks of one host exchange into /dev/shm, and crash or crawl where it is full."""
    ranks, free = around.launcher.local_size or 1, around.free_shm_bytes
    needed = ranks * SHM_BYTES_PER_RANK
    if ranks < 2 or free is None or free >= needed:
        return None
    return Problem(
        f"{_SHM} has {free >> 20} MiB free; {ranks} ranks of one host need {needed >> 20} MiB",
        f"in a container: `docker run --shm-size=1g ...` or `--ipc=host`; else remove what is left over in {_SHM}, or "
        f"make it larger: `mount -o remount,size=8g {_SHM}`",
    )


def check_mpi_library(around: Surroundings) -> Problem | None:
    """The library that mpi4py loads and the launcher don't speak the same protocol."""
    if around.mpi_library is None or around.launcher.kind == "none":
        return None
    library = around.mpi_library.split(",")[0].split("\n")[0].strip("\0 ")
    kind = around.launcher.kind
    if around.is_open_mpi == (kind != "pmi"):
        return None
    launcher = {
        "openmpi": "Open MPI's mpirun",
        "pmix": "srun --mpi=pmix",
        "pmi": "srun --mpi=pmi2" if around.slurm.in_step else "MPICH's mpirun (PMI)",
    }[kind]
    if around.slurm.in_step:
        fix = "use `srun --mpi=pmix`" if around.is_open_mpi else "use `srun --mpi=pmi2`"
    else:
        fix = "use the mpirun of that library, or point MPI4PY_LIBMPI at the launcher's libmpi.so"
    return Problem(f"{launcher} started this process, but mpi4py loads {library}", fix)


def check_world_size(around: Surroundings) -> Problem | None:
    """MPI sees another number of ranks than the launcher started."""
    expected = around.launcher.size
    if around.world_size is None or expected is None or around.world_size == expected:
        return None
    return Problem(
        f"the launcher started {expected} ranks, but MPI sees {around.world_size}",
        "mpirun and the libmpi that mpi4py loads must be of one installation: "
        "`python -m mpi4py --mpi-lib-version` shows the library; under Slurm use `srun --mpi=pmix` (`srun --mpi=list`)",
    )


def check_packing(around: Surroundings) -> Problem | None:
    """mpirun in a Slurm job of several nodes has put more ranks on this one than Slurm gave it tasks."""
    slurm, here = around.slurm, around.local_size
    if slurm.num_nodes < 2 or slurm.in_step or here is None or slurm.tasks_on_node is None:
        return None
    if here <= slurm.tasks_on_node:
        return None
    return Problem(
        f"{here} ranks are on one host, but this Slurm job has {slurm.num_nodes} nodes of {slurm.tasks_on_node} tasks",
        "leave out --oversubscribe and `unset PRTE_MCA_rmaps_default_mapping_policy`, or say "
        f"`mpirun --map-by ppr:{slurm.tasks_on_node}:node`: with oversubscription allowed, mpirun fills the first node",
    )


CHECKS: tuple[Check, ...] = (
    Check("launcher", check_launcher),
    Check("Slurm tasks", check_slurm_tasks),
    Check("mpi4py", check_mpi4py),
    Check("visible GPUs", check_visible_devices),
    Check("shared memory", check_shared_memory),
    Check("MPI library", check_mpi_library),
    Check("world size", check_world_size),
    Check("ranks a node", check_packing),
)


def find_problem(around: Surroundings) -> Problem | None:
    """The first."""
    return next((problem for check in CHECKS if (problem := check.find(around)) is not None), None)


def require(around: Surroundings) -> None:
    """Errors: UsageError with the first problem and its fix."""
    problem = find_problem(around)
    if problem is not None:
        raise UsageError(str(problem))
