"""Which GPUs of a host reach each other's memory, and how fast copies between them are, for `dist-infer doctor`."""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from dist_infer.cli.findings import Finding

COPIED_BYTES = 256 << 20
_NUM_COPIES = 8

Matrix: TypeAlias = Sequence[Sequence[float | None]]
"""GB/s of copies from the GPU of the row to that of the column; None: there is no peer access, or it is one GPU."""


def measure_matrix() -> list[list[float | None]]:
    """All pairs of the GPUs that this process sees.

    Ranks: local. Stream: the devices' current ones; waits for them.
    Errors: torch.OutOfMemoryError where a GPU has no room for the copy.
    """
    devices = range(torch.cuda.device_count())
    return [[_gb_per_s(source, target) for target in devices] for source in devices]


def _gb_per_s(source: int, target: int) -> float | None:
    if source == target or not torch.cuda.can_device_access_peer(source, target):
        return None
    with torch.cuda.device(source):
        x = torch.ones(COPIED_BYTES, dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x, device=torch.device("cuda", target))
        y.copy_(x)  # opens the way
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(_NUM_COPIES):
            y.copy_(x)
        end.record()
        end.synchronize()
        return _NUM_COPIES * COPIED_BYTES / (float(start.elapsed_time(end)) * 1e6)


def find_peers(host: str, matrix: Matrix | None) -> list[Finding]:
    """The matrix of a host, a line a GPU, and what is missing in it. None: there was no room for copies."""
    name = f"GPUs of {host}"
    if matrix is None:
        room = f"{2 * COPIED_BYTES >> 20} MiB"
        return [Finding(name, note=f"copies between them are not measured: a GPU has no {room} free; end what uses it")]
    if len(matrix) < 2:
        return []
    missing = [
        f"{source} to {target}"
        for source, row in enumerate(matrix)
        for target, speed in enumerate(row)
        if speed is None and source != target
    ]
    findings = [Finding(name, "\n".join(["copies in GB/s, from the row's GPU to the column's", *matrix_lines(matrix)]))]
    if missing:
        findings.append(
            Finding(
                name,
                note=f"no peer access from GPU {', '.join(missing)}: what ranks exchange there goes by NCCL, which is"
                " slower for few tokens; give a job GPUs that are linked",
            )
        )
    return findings


def matrix_lines(matrix: Matrix) -> list[str]:
    """A head line, then a line a GPU."""
    head = "".join(f"{target:>7}" for target in range(len(matrix)))
    lines = [
        f"{source:>10}" + "".join(f"{_cell(source, target, speed):>7}" for target, speed in enumerate(row))
        for source, row in enumerate(matrix)
    ]
    return [" " * 10 + head, *lines]


def _cell(source: int, target: int, speed: float | None) -> str:
    if source == target:
        return "-"
    return "none" if speed is None else f"{speed:.0f}"
