"""Checks of the surroundings, each with the fix: `run` refuses to start on the first that fails, `doctor` prints all.

A check looks at what is known so far and finds nothing wrong with what is not known yet, so the same list is gone
through before MPI is loaded, before it is initialised and after.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from dist_infer.errors import UsageError
from dist_infer.launch.slurm_env import SlurmEnv

LauncherKind = Literal["none", "openmpi", "pmi", "pmix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """What a launcher has put into the environment of this process."""

    kind: LauncherKind
    rank: int  # 0 where it is not told
    size: int | None  # None where it is not told

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Self:
        """Open MPI's mpirun, then PMI (MPICH's mpirun, srun --mpi=pmi2), then PMIx (srun --mpi=pmix)."""
        if "OMPI_COMM_WORLD_SIZE" in env:
            return cls(
                kind="openmpi", rank=int(env.get("OMPI_COMM_WORLD_RANK", 0)), size=int(env["OMPI_COMM_WORLD_SIZE"])
            )
        if "PMI_RANK" in env:
            size = int(env["PMI_SIZE"]) if "PMI_SIZE" in env else None
            return cls(kind="pmi", rank=int(env["PMI_RANK"]), size=size)
        if "PMIX_RANK" in env:
            slurm = SlurmEnv.read(env)
            return cls(kind="pmix", rank=int(env["PMIX_RANK"]), size=slurm.num_tasks if slurm.in_step else None)
        return cls(kind="none", rank=0, size=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is known of this process's surroundings; None: not yet."""

    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    mpi_library: str | None = None  # what MPI_Get_library_version says
    world_size: int | None = None

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
    """PMIX_RANK without a launcher that we know: MPI_Init would fail or make worlds of one."""
    if around.launcher.kind != "pmix" or around.slurm.in_step:
        return None
    return Problem(
        "PMIX_RANK is set, but neither Open MPI's mpirun nor srun started this process",
        "start it by `mpirun -n 2 dist-infer ...` or `srun --mpi=pmix -n 2 dist-infer ...`; "
        "if the variable is left over in this shell: `env -u PMIX_RANK dist-infer ...`",
    )


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
        "for one process on purpose: `env -u SLURM_NTASKS dist-infer ...`",
    )


def check_mpi4py(around: Surroundings) -> Problem | None:
    """A launcher, but no mpi4py."""
    if around.launcher.kind == "none" or importlib.util.find_spec("mpi4py") is not None:
        return None
    return Problem("an MPI launcher started this process, but mpi4py is not installed", "pip install 'dist-infer[mpi]'")


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


CHECKS: tuple[Check, ...] = (
    Check("launcher", check_launcher),
    Check("Slurm tasks", check_slurm_tasks),
    Check("mpi4py", check_mpi4py),
    Check("MPI library", check_mpi_library),
    Check("world size", check_world_size),
)


def require(around: Surroundings) -> None:
    """Errors: UsageError with the first problem and its fix."""
    for check in CHECKS:
        problem = check.find(around)
        if problem is not None:
            raise UsageError(str(problem))
