"""The part of `dist-infer doctor` that needs a world: all ranks report, rank 0 prints."""

import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dist_infer import __version__
from dist_infer.cli.findings import AFTER_START, Finding, show
from dist_infer.cli.peer_matrix import find_peers, measure_matrix
from dist_infer.comm.mesh import Mesh
from dist_infer.errors import ExitCode
from dist_infer.launch.world import World, run_world
from dist_infer.memory import free_bytes, num_sharers

Report = Mapping[str, Any]

_GIB = 2**30


def examine(launcher: str | None) -> int:
    """The exit code, the same on all ranks. Ranks: collective over the world, which it opens."""
    return run_world(partial(_examine, launcher), device="auto")


def _examine(launcher: str | None, world: World) -> int:
    reports = world.vote("doctor", None, describe(world))
    findings = [
        *find_started(launcher),
        find_world(reports, launcher),
        *(find_rank(report) for report in reports),
        find_versions(reports),
        find_threads(reports),
        find_collectives(world),
        *find_pairs(world),
    ]
    if world.rank == 0:
        show(findings)
    return ExitCode.ERROR if any(finding.wrong for finding in findings) else ExitCode.DONE


def describe(world: World) -> dict[str, object]:
    """What one rank knows of itself; JSON values."""
    on_gpu = world.device.type == "cuda"
    sharers = num_sharers(world.device, local_size=world.local_size, gpu_shared=world.gpu_shared)
    return {
        "rank": world.rank,
        "host": world.host,
        "pid": os.getpid(),
        "device": str(world.device),
        "name": torch.cuda.get_device_name(world.device) if on_gpu else platform.machine(),
        "free_bytes": free_bytes(world.device, sharers=sharers),
        "peers": _peers(world.device) if on_gpu else [],
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "dist_infer": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "CUDA": str(torch.version.cuda),
        },
    }


def find_started(launcher: str | None) -> list[Finding]:
    """The rest of preflight: a world that doesn't pass it is never opened."""
    detail = f"fits {launcher}" if launcher else "one process by itself needs none"
    return [Finding(name, detail) for name in AFTER_START]


def find_world(reports: Sequence[Report], launcher: str | None) -> Finding:
    """How many ranks, where."""
    hosts = sorted({str(report["host"]) for report in reports})
    started = f"started by {launcher}" if launcher else "started by hand"
    return Finding("world", f"{len(reports)} ranks on {len(hosts)} hosts ({', '.join(hosts)}), {started}")


def find_rank(report: Report) -> Finding:
    """A rank's device and memory."""
    name = f"rank {report['rank']}"
    where = f"host {report['host']}, {report['device']} ({report['name']})"
    memory = f"{report['free_bytes'] / _GIB:.1f} GiB of memory free for it"
    peers = f", reaches the memory of GPUs {report['peers']}" if report["peers"] else ""
    if report["free_bytes"] < _GIB // 4:
        return Finding(name, wrong=f"{where} has {memory}; end what uses it, or start fewer ranks on this host")
    return Finding(name, f"{where}, {memory}{peers}, {report['threads']} threads on {report['cores']} cores")


def find_versions(reports: Sequence[Report]) -> Finding:
    """All ranks run the same software."""
    first = reports[0]["versions"]
    for report in reports:
        if report["versions"] != first:
            return Finding(
                "versions",
                wrong=f"rank {report['rank']} on host {report['host']} has {_words(report['versions'])}, rank 0 has "
                f"{_words(first)}; install the same environment on all hosts",
            )
    return Finding("versions", _words(first))


def find_threads(reports: Sequence[Report]) -> Finding:
    """Ranks that compute on the CPU have cores of their own: threads that wait for a core make a step crawl."""
    by_host: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        if report["device"] == "cpu":
            by_host[str(report["host"])].append(report)
    for host, ranks in by_host.items():
        threads, cores = sum(rank["threads"] for rank in ranks), max(rank["cores"] for rank in ranks)
        if len(ranks) > 1 and threads > max(cores, len(ranks)):
            fix = f"export OMP_NUM_THREADS={max(1, cores // len(ranks))} OMP_WAIT_POLICY=passive"
            return Finding(
                "threads", wrong=f"{len(ranks)} ranks on host {host} have {threads} threads on {cores} cores; {fix}"
            )
    return Finding("threads", "enough cores")


def find_collectives(world: World) -> Finding:
    """A sum over all ranks comes out right on each. Ranks: collective over the world."""
    collectives = world.communicators(Mesh.create(world=world.size, rank=world.rank)).world
    ones = torch.full((3,), float(world.rank + 1), dtype=torch.float32, device=world.device)
    total, expected = float(collectives.all_reduce(ones)[0]), world.size * (world.size + 1) / 2
    sums = [report["sum"] for report in world.vote("collectives", None, {"sum": total})]
    if any(one != expected for one in sums):
        return Finding("collectives", wrong=f"a sum over the ranks must be {expected}, the ranks have {sums}")
    return Finding("collectives", f"a sum over {world.size} ranks is right on all")


def find_pairs(world: World) -> list[Finding]:
    """Copies between the GPUs of each host, measured by its first rank. Ranks: collective over the world."""
    report: dict[str, object] = {}
    failed: Exception | None = None
    if world.local_rank == 0 and world.device.type == "cuda":
        report = {"host": world.host, "matrix": None}
        try:
            report["matrix"] = measure_matrix()
        except torch.OutOfMemoryError:  # said by find_peers
            pass
        except RuntimeError as error:
            failed = error
    reports = world.vote("copies between GPUs", failed, report)
    return [finding for one in reports if one for finding in find_peers(one["host"], one["matrix"])]


def _peers(device: torch.device) -> list[int]:
    own = device.index or 0
    others = [idx for idx in range(torch.cuda.device_count()) if idx != own]
    return [idx for idx in others if torch.cuda.can_device_access_peer(own, idx)]


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
