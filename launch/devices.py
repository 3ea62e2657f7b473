"""Which device a rank computes on, and whether two ranks got the same one."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from dist_infer.errors import UsageError

DeviceChoice = Literal["auto", "cpu", "cuda"]


def choose_device(requested: DeviceChoice, local_rank: int) -> torch.device:
    """The local index among the visible devices, modulo their number.

    So it is right where a launcher shows each rank all GPUs of the host, and where it shows each rank only its own.

    Errors: UsageError for "cuda" without a CUDA device.
    """
    count = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cuda" and count == 0:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu, or a torch build for CUDA")
    return device_at(local_rank, count)


def device_at(local_rank: int, num_visible: int) -> torch.device:
    """CPU where nothing is visible."""
    return torch.device("cuda", local_rank % num_visible) if num_visible else torch.device("cpu")


def device_identity(device: torch.device) -> str:
    """The same text for the same GPU, whatever its index is in this process; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def shared_gpus(reports: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Ranks that hold one GPU together. A report has host, device and gpu (the identity)."""
    holders: dict[tuple[object, object], list[int]] = {}
    for rank, report in enumerate(reports):
        if report["gpu"]:
            holders.setdefault((report["host"], report["gpu"]), []).append(rank)
    return [ranks for ranks in holders.values() if len(ranks) > 1]


def find_device_fault(reports: Sequence[Mapping[str, object]], *, share_gpu: bool) -> str | None:
    """Why these ranks can't work together, in words with the fix; None where they can."""
    kinds = {rank: "cuda" if report["gpu"] else "cpu" for rank, report in enumerate(reports)}
    if len(set(kinds.values())) > 1:
        on_cpu = [rank for rank, kind in kinds.items() if kind == "cpu"]
        hosts = sorted({str(reports[rank]["host"]) for rank in on_cpu})
        return (
            f"ranks {on_cpu} on {', '.join(hosts)} see no GPU, the others do; use --device cpu, or hosts with GPUs only"
        )
    for ranks in [] if share_gpu else shared_gpus(reports):
        report = reports[ranks[0]]
        return (
            f"ranks {ranks} on {report['host']} share one GPU ({report['gpu']}); start at most one rank a GPU "
            "(check CUDA_VISIBLE_DEVICES and the ranks a host), or allow it with --share-gpu"
        )
    return None
