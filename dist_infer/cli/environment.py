"""What the environment says to the command line: who launched this process, and where caches go."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from dist_infer.errors import UsageError
from dist_infer.intake.output_lock import RESTART
from dist_infer.launch.slurm_env import SlurmEnv

# Launchers set the rank before MPI_Init; the first pair that is there counts.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("a PMIx launcher", "PMIX_RANK", ""),
)
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The launcher that started this process, as far as its variables tell."""

    name: str
    rank: int
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a job takes from the environment. `launcher` is None for a process that was started by hand."""

    launcher: Launcher | None
    cache_dir: Path
    job_id: str | None = None  # of the batch system, with its number of restarts

    @property
    def speaks(self) -> bool:
        """This process tells the user what all ranks have found: rank 0, as far as one can know before MPI starts."""
        return self.launcher is None or self.launcher.rank == 0

    def export(self, env: MutableMapping[str, str]) -> None:
        """Set what libraries read from `env` when they are loaded, unless the user has: the place of compiled kernels,
        and an allocator of device memory that doesn't break it into pieces.
        """
        env.setdefault("TRITON_CACHE_DIR", str(self.cache_dir / "triton"))
        env.setdefault("CUTE_DSL_CACHE_DIR", str(self.cache_dir / "cute"))
        if "PYTORCH_CUDA_ALLOC_CONF" not in env:  # the older name of the other
            env.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Environment":
        """Read `env`; nothing is created.

        Errors: UsageError when no cache folder can be named.
        """
        job_id = next((env[name] for name in _JOB_IDS if env.get(name)), None)
        restarts = SlurmEnv.read(env).restart_count
        if job_id is not None and restarts:
            job_id = f"{job_id}{RESTART}{restarts}"
        return cls(launcher=read_launcher(env), cache_dir=_cache_dir(env), job_id=job_id)


def read_launcher(env: Mapping[str, str]) -> Launcher | None:
    """The launcher, None without one. A Slurm step of one task counts as none: it is a shell or a single process."""
    for name, rank_variable, size_variable in _LAUNCHERS:
        rank = env.get(rank_variable, "")
        if rank.isdigit():
            size = env.get(size_variable, "")
            return Launcher(name=name, rank=int(rank), size=int(size) if size.isdigit() else None)
    slurm = SlurmEnv.read(env)
    if slurm.in_step and slurm.proc_id is not None and slurm.num_tasks > 1:
        return Launcher(name="srun", rank=slurm.proc_id, size=slurm.num_tasks)
    return None


def _cache_dir(env: Mapping[str, str]) -> Path:
    """DIST_INFER_CACHE, else dist-infer below the XDG cache folder.

    Source: XDG Base Directory Specification (a relative XDG_CACHE_HOME is ignored).
    """
    own = env.get("DIST_INFER_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = Path(env.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "dist-infer"
    home = env.get("HOME")
    if not home:
        raise UsageError("there is no place for caches: set DIST_INFER_CACHE to a folder (HOME is not set)")
    return Path(home) / ".cache" / "dist-infer"
