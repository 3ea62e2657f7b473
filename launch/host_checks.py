"""What keeps an mpirun from starting ranks on this host, found before it is called: each with the fix.

`dist-infer doctor` prints these when it runs by itself. Where mpirun refuses, no rank is there that could say why.
`python -m dist_infer.launch.mpirun` needs none of the fixes: it adds what its launcher needs.
"""

import os
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dist_infer.launch.mpirun import Launcher, num_cores
from dist_infer.launch.preflight import Problem

_ROOT_VARIABLES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_AGENT_VARIABLES = ("OMPI_MCA_plm", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_rsh_agent")
_CROWD_VARIABLES = ("PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_rmaps_base_oversubscribe")
_BY_MODULE = "or start ranks of this host by `python -m dist_infer.launch.mpirun -n 2 -- dist-infer ...`"


def _resolves() -> bool:
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an mpirun on this host would meet. `launcher` None: there is none."""

    launcher: Launcher | None
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    num_ranks: int | None = None  # None: not known
    is_root: bool = field(default_factory=lambda: os.geteuid() == 0)
    name_resolves: bool = field(default_factory=_resolves)

    def is_open_mpi(self, major: int | None = None) -> bool:
        """The launcher is Open MPI's, of that version."""
        launcher = self.launcher
        return launcher is not None and launcher.family == "openmpi" and major in (None, launcher.major)


def check_root(host: Host) -> Problem | None:
    """Open MPI's mpirun refuses root unless both variables are set."""
    missing = [name for name in _ROOT_VARIABLES if host.env.get(name) != "1"]
    if not host.is_root or not host.is_open_mpi() or not missing:
        return None
    settings = " ".join(f"{name}=1" for name in _ROOT_VARIABLES)
    return Problem(
        f"Open MPI's mpirun refuses to run as root without {missing[0]}=1", f"`export {settings}`, {_BY_MODULE}"
    )


def check_slots(host: Host) -> Problem | None:
    """Open MPI's mpirun refuses more ranks than cores."""
    cores = num_cores()
    allowed = any(host.env.get(name) for name in _CROWD_VARIABLES) or "SLURM_JOB_ID" in host.env
    if not host.is_open_mpi() or host.num_ranks is None or host.num_ranks <= cores or allowed:
        return None
    return Problem(
        f"Open MPI's mpirun has {cores} slots (cores) on this host for {host.num_ranks} ranks",
        f"`mpirun --oversubscribe --bind-to none -n {host.num_ranks} ...`, {_BY_MODULE}",
    )


def check_ssh(host: Host) -> Problem | None:
    """Open MPI 4's mpirun looks for ssh even where all ranks are on this host."""
    cured = any(name in host.env for name in _AGENT_VARIABLES) or "SLURM_JOB_ID" in host.env
    path = host.env.get("PATH")
    if not host.is_open_mpi(4) or cured or shutil.which("ssh", path=path) or shutil.which("rsh", path=path):
        return None
    return Problem(
        "Open MPI 4's mpirun finds neither ssh nor rsh and refuses to start",
        f"`apt-get install openssh-client`, or for this host alone `export OMPI_MCA_plm=isolated`, {_BY_MODULE}",
    )


def check_host_name(host: Host) -> Problem | None:
    """MPICH's mpirun and NCCL look their own host's name up; dist-infer itself doesn't."""
    if host.name_resolves:
        return None
    name = socket.gethostname()
    return Problem(f"the name of this host, {name}, has no address", f"`echo '127.0.1.1 {name}' >> /etc/hosts`")


HOST_CHECKS: tuple[tuple[str, Callable[[Host], Problem | None]], ...] = (
    ("mpirun as root", check_root),
    ("slots", check_slots),
    ("ssh", check_ssh),
    ("host name", check_host_name),
)
