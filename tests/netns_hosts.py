"""Two hosts on one machine: a network namespace each, joined by a cable, with own host names and hosts files.

Enough for an mpirun over several hosts and for a network that fails. Needs root and Debian's iproute2. In place of ssh
there is a launch agent, a script with ssh's calling convention.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_infer.launch import mpirun

_ENTER = """
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
export TMPDIR="$1/tmp.$2"
shift 2
exec "$@"
"""


def why_not() -> str | None:
    """The reason for skipping where there can be none."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "apt: ip is not installed: apt-get install iproute2, or make test-slurm"
    if os.geteuid() != 0:
        return "root: network namespaces need root"
    name = f"di{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode != 0:
        return f"root: no network namespaces here: {made.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass(frozen=True)
class Host:
    """One of the two."""

    name: str
    namespace: str
    address: str


class TwoHosts:
    """Hosts with dotted names, up between `start` and `stop`. Names that don't resolve are launched on by address."""

    def __init__(self, folder: Path, *, names_resolve: bool = True) -> None:
        self.folder = folder
        self.names_resolve = names_resolve
        self.hosts = [Host(f"node{idx}.rack7.test", f"di{os.getpid()}n{idx}", f"10.77.0.{idx + 1}") for idx in range(2)]
        self.agent = folder / "agent"

    def start(self) -> None:
        """Make them. Errors: CalledProcessError."""
        self.folder.mkdir(parents=True)
        lines = [f"{host.address} {host.name}\n" for host in self.hosts if self.names_resolve]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        for host in self.hosts:
            (self.folder / f"tmp.{host.name}").mkdir()
            _ip("netns", "add", host.namespace)
        first, second = self.hosts
        cable = ["type", "veth", "peer", "name", "eth0", "netns", second.namespace]
        _ip("link", "add", "eth0", "netns", first.namespace, *cable)
        for host in self.hosts:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        self._write_agent()

    def _write_agent(self) -> None:
        """Called as `agent [-option ...] HOST COMMAND...`."""
        cases = [
            f'{host.name} | {host.address}) set -- {shlex.join(self.on(host))} sh -c "$*" ;;' for host in self.hosts
        ]
        script = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "host=$1", "shift", "case $host in"]
        script += [*cases, '*) echo "agent: no host $host" >&2; exit 1 ;;', "esac", 'exec "$@"']
        self.agent.write_text("\n".join(script) + "\n")
        self.agent.chmod(0o755)

    def on(self, host: Host) -> list[str]:
        """What comes before a command to run it on that host; the process stays the same one."""
        enter = ["unshare", "--uts", "--mount", "sh", "-ec", _ENTER, "sh", str(self.folder), host.name]
        return ["ip", "netns", "exec", host.namespace, *enter]

    def launch(self, launcher: mpirun.Launcher, argv: Sequence[str], env: dict[str, str]) -> mpirun.Command:
        """mpirun on the first host, two ranks on each."""
        inner = mpirun.command(4, argv, launcher=launcher, oversubscribe=False, extra_env=env)
        names = [host.name if self.names_resolve else host.address for host in self.hosts]
        if launcher.family == "openmpi":
            flags = ["--host", ",".join(f"{name}:2" for name in names), "--bind-to", "none"]
            agent = {"PRTE_MCA_plm_ssh_agent": str(self.agent)}
        else:
            flags = ["-launcher", "ssh", "-launcher-exec", str(self.agent), "-hosts", ",".join(names), "-ppn", "2"]
            agent = {}
        mpirun_here = [launcher.path, *flags, "-n", "4", *argv]
        return mpirun.Command(argv=(*self.on(self.hosts[0]), *mpirun_here), env=inner.env | agent)

    def cut(self) -> None:
        """The second host's interface goes down."""
        _ip("-n", self.hosts[1].namespace, "link", "set", "eth0", "down")

    def mend(self) -> None:
        """And up again."""
        _ip("-n", self.hosts[1].namespace, "link", "set", "eth0", "up")

    def pids(self) -> list[int]:
        """Of all processes on the hosts."""
        found = []
        for host in self.hosts:
            shown = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=False)
            found += [int(pid) for pid in shown.stdout.split()]
        return found

    def end_processes(self) -> None:
        """Whatever is left on the hosts."""
        until = time.monotonic() + 10
        while (pids := self.pids()) and time.monotonic() < until:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def stop(self) -> None:
        """Remove them with all that runs there."""
        self.end_processes()
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


@contextlib.contextmanager
def two_hosts(folder: Path, *, names_resolve: bool = True) -> Iterator[TwoHosts]:
    """Hosts that are gone afterwards, whatever happens."""
    hosts = TwoHosts(folder, names_resolve=names_resolve)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
