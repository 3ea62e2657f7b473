"""A throw-away Slurm of virtual nodes on this machine: munged, slurmctld and a slurmd a node, its files in one folder.

Needs root, Debian's packages slurm-wlm, munge and libpmix-dev (`make test-slurm` installs them), and namespaces of
mounts and host names: each node has its own host name and hosts file, because MPI tells by the host name which ranks
share memory. GPUs are character devices that only Slurm believes in.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare")
PMIX = "pmix2/lib/libpmix.so"  # what Slurm's plugin opens by this path; only libpmix-dev has it

_UP_S = 60.0
_CALL_S = 60.0
_DOWN_S = 10.0


def why_not() -> str | None:
    """The reason for skipping where a cluster can't be started."""
    missing = [name for name in DAEMONS if shutil.which(name, path=_path()) is None]
    if not missing and not any(Path("/usr/lib").glob(f"*/{PMIX}")):
        missing = [PMIX]
    if missing:
        return (
            f"apt: {', '.join(missing)} not installed: apt-get install slurm-wlm munge libpmix-dev, or make test-slurm"
        )
    if os.geteuid() != 0:
        return "root: virtual Slurm nodes need root"
    namespaces = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False)
    return None if namespaces.returncode == 0 else f"root: no namespaces here: {namespaces.stderr.decode().strip()}"


@dataclass(kw_only=True)
class SlurmCluster:
    """Nodes n1, n2 ... with `cpus` each, which may be more than there are, and `gpus` devices."""

    folder: Path  # its path is short: sockets are in it
    num_nodes: int = 2
    cpus: int = 4
    gpus: int = 2
    ports: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ports = _free_ports(1 + self.num_nodes)

    @property
    def nodes(self) -> list[str]:
        """Their names."""
        return [f"n{idx + 1}" for idx in range(self.num_nodes)]

    @property
    def env(self) -> dict[str, str]:
        """What Slurm's commands need."""
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PM"))}
        return outer | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def start(self) -> None:
        """Up to all nodes idle. Errors: RuntimeError with the logs."""
        for name in ("log", "state", "spool", "tmp", "dev", "munge"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o700)
        (self.folder / "socket").mkdir(mode=0o755)
        (self.folder / "slurm.conf").write_text(self.configuration())
        hosts = [f"127.0.1.{idx + 1} {node}\n" for idx, node in enumerate(self.nodes)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        for idx in range(self.gpus):
            os.mknod(self.folder / "dev" / f"gpu{idx}", 0o666 | 0o020000, os.makedev(1, 3))
        if self.gpus:
            (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/gpu[0-{self.gpus - 1}]\n")
        self._start_munged()
        self.call("slurmctld", "-c")
        for node in self.nodes:
            for kind in ("spool", "tmp"):
                (self.folder / kind / node).mkdir()
            enter = f"mount --bind {self.folder}/hosts /etc/hosts && hostname {node} && exec slurmd -N {node}"
            self.call("unshare", "--uts", "--mount", "sh", "-c", enter)
        self._wait_until_idle()

    def configuration(self) -> str:
        """slurm.conf. Everything is quick: a job starts at once, and TERM is followed by KILL after 5 s."""
        folder, host = self.folder, socket.gethostname().split(".")[0]
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.1.{idx + 1} Port={self.ports[idx + 1]}"
            f" CPUs={self.cpus} RealMemory=4000 State=UNKNOWN{gres}"
            for idx, node in enumerate(self.nodes)
        ]
        return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self.ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/socket/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2,requeue_delay=1
ReturnToService=2
KillWait=5
CompleteWait=0
MessageTimeout=30
MinJobAge=600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
GresTypes=gpu
{chr(10).join(lines)}
PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE PriorityTier=1 GraceTime=3
PartitionName=urgent Nodes=ALL Default=NO State=UP MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

    def _start_munged(self) -> None:
        """With a key, a socket and a log of its own, so that a munge of this machine stays untouched."""
        own = self.folder / "munge"
        (own / "key").write_bytes(os.urandom(128))
        (own / "key").chmod(0o600)
        places = [f"--key-file={own}/key", f"--socket={self.folder}/socket/munge", f"--seed-file={own}/seed"]
        self.call("munged", "--force", *places, f"--pid-file={self.folder}/munged.pid", f"--log-file={own}/log")

    def _wait_until_idle(self) -> None:
        until = time.monotonic() + _UP_S
        while (
            self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split() != ["idle"] * self.num_nodes
        ):
            if time.monotonic() > until:
                logs = [path.read_text(errors="replace")[-2000:] for path in sorted((self.folder / "log").iterdir())]
                raise RuntimeError("Slurm did not come up:\n" + "\n".join(logs))
            time.sleep(0.1)

    def stop(self) -> None:
        """End all jobs, then the daemons, each only if its pid is still what it was."""
        self.call("scancel", "--full", "--signal=KILL", "--user=root", check=False)
        self.call("scancel", "--user=root", check=False)
        until = time.monotonic() + _DOWN_S
        while self.call("squeue", "-h", check=False) and time.monotonic() < until:
            time.sleep(0.1)
        for pattern, name in (("slurmd-*.pid", "slurmd"), ("slurmctld.pid", "slurmctld"), ("munged.pid", "munged")):
            wait_s = 0.5 if name == "slurmd" else _DOWN_S  # it takes 3 s to say goodbye to nobody
            _end(
                [pid for file in self.folder.glob(pattern) if (pid := _read_pid(file, name)) is not None], name, wait_s
            )

    def call(self, *argv: str, env: Mapping[str, str] | None = None, check: bool = True) -> str:
        """What a command of Slurm prints. Errors: RuntimeError where it fails."""
        done = subprocess.run(
            argv,
            env=self.env | dict(env or {}),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CALL_S,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    # Jobs.

    def submit(self, script: Path, *options: str, log: Path, **variables: str) -> str:
        """The id of the new job. `variables` go into its environment."""
        python = Path(sys.executable).parent
        env = {"PATH": f"{python}:{_path()}"} | variables
        return self.call(
            "sbatch", "--parsable", f"--output={log}", f"--chdir={log.parent}", *options, str(script), env=env
        )

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says of it, also after its end."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job_id).splitlines()[0]
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait(self, job_id: str, *states: str, limit_s: float = 120.0) -> dict[str, str]:
        """Until the job is in one of the states. Errors: TimeoutError."""
        until = time.monotonic() + limit_s
        while (fields := self.job(job_id))["JobState"] not in states:
            if time.monotonic() > until:
                raise TimeoutError(f"job {job_id} is {fields['JobState']} and not {' or '.join(states)}")
            time.sleep(0.2)
        return fields


@contextlib.contextmanager
def running_cluster(folder: Path, *, num_nodes: int = 2, cpus: int = 4, gpus: int = 2) -> Iterator[SlurmCluster]:
    """A cluster that is gone afterwards, whatever happens."""
    cluster = SlurmCluster(folder=folder, num_nodes=num_nodes, cpus=cpus, gpus=gpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _path() -> str:
    """Debian keeps daemons where only root looks."""
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _read_pid(file: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        pid = int(file.read_text())
        return pid if _is(pid, name) else None
    return None


def _is(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    except OSError:
        return False


def _end(pids: Sequence[int], name: str, wait_s: float) -> None:
    """TERM to all, KILL to those that are still there."""
    for number, limit_s in ((signal.SIGTERM, wait_s), (signal.SIGKILL, 1.0)):
        for pid in pids:
            if _is(pid, name):
                os.kill(pid, number)
        until = time.monotonic() + limit_s
        while any(_is(pid, name) for pid in pids) and time.monotonic() < until:
            time.sleep(0.05)
