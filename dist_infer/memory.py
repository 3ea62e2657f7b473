"""How much memory this rank may still take. Linux only, like everything that launches ranks."""

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, *, sharers: int) -> int:
    """Free memory of the device, or of the host; `sharers` ranks share it evenly.

    Ranks: local; a snapshot, so ranks agree on their minimum.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // sharers
    return min(_free_of_host(_MEMINFO), _free_of_cgroup(_CGROUP)) // sharers


def num_sharers(device: torch.device, *, local_size: int, gpu_shared: bool) -> int:
    """How many of the `local_size` ranks of this host share the memory of the device."""
    if device.type == "cpu":
        return local_size
    return -(-local_size // torch.cuda.device_count()) if gpu_shared else 1


def _free_of_host(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{meminfo} has no MemAvailable: give --num-kv-blocks")


def _free_of_cgroup(folder: Path) -> int:
    """What a container's own limit leaves; without one, more than any host has."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - used)
