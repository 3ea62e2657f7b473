"""The kernels of one decode step, as the profiler of torch sees them on a GPU."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_NUM_PROFILED = 3
_NOT_KERNELS = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """A kernel, or a copy, that the device ran. Units: microseconds of the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step. `busy_us` counts where kernels overlap once; `span_us` is from the first to the end of the last."""

    num_kernels: int
    busy_us: float
    span_us: float
    kernels: tuple[tuple[str, int, float], ...]  # name, launches, their time together; what takes longest comes first


def profile_step(run: Callable[[], None], device: torch.device) -> StepProfile | None:
    """The step that `run` runs to its end; of several the one of median length. None where the profiler sees nothing.

    Ranks: collective where `run` is.
    """
    run()
    profiles = []
    for _ in range(_NUM_PROFILED):
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize(device)
        events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        work = [DeviceWork(event.name, event.time_range.start, event.time_range.end) for event in events]
        if work:
            profiles.append(summarize(work))
    profiles.sort(key=lambda found: found.span_us)
    return profiles[len(profiles) // 2] if profiles else None


def summarize(work: Sequence[DeviceWork]) -> StepProfile:
    """The figures of a step's kernels and copies, in any order, at least one."""
    busy_us, end_us = 0.0, float("-inf")
    times: dict[str, list[float]] = defaultdict(list)
    for piece in sorted(work, key=lambda piece: piece.start_us):
        busy_us += max(0.0, piece.end_us - max(piece.start_us, end_us))
        end_us = max(end_us, piece.end_us)
        times[piece.name].append(piece.end_us - piece.start_us)
    kernels = [(name, len(own), sum(own)) for name, own in times.items()]
    return StepProfile(
        num_kernels=sum(count for name, count, _ in kernels if not name.startswith(_NOT_KERNELS)),
        busy_us=busy_us,
        span_us=end_us - min(piece.start_us for piece in work),
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel[2])),
    )
