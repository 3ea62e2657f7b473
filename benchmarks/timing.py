"""How every benchmark here measures, and the form of its results.

- Rotation: each candidate runs over several copies of its inputs, together larger than the last cache, so that no call
  finds its data there. The candidates' samples are interleaved, so that a drifting clock hits all alike.
- On a GPU the calls of one sample are captured in a CUDA graph and timed by events: host time is not measured. The time
  of an empty kernel, measured the same way, goes into the results' meta.
- Poison: outputs are overwritten before a checked run; a row that is still poison afterwards was never computed.
- A figure is the median of the samples.
"""

import datetime
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import torch

from dist_infer import step_floor

Inputs = TypeVar("Inputs")
Run = Callable[[Inputs], Sequence[torch.Tensor]]  # its outputs

RESULTS = Path(__file__).parent / "results"
POISON = 0xA5  # a byte; in no format a NaN, so that poisoned inputs of an in-place op don't stick

# What one H200 reaches at best, for lower bounds.
READ_TB_PER_S = step_floor.READ_TB_PER_S["NVIDIA H200"]
COPY_TB_PER_S = 4.26  # bytes read and written together
TFLOP_PER_S = {"bf16": 784.5, "fp8": 1453.8}

_CPU_CACHE_BYTES = 64 * 2**20
_MAX_COPIES = 64
_MIN_SAMPLE_US = 200.0


class BenchmarkError(Exception):
    """A candidate that does not compute what it is timed for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Of one call. Units: microseconds."""

    median_us: float
    low_us: float  # 10th percentile
    high_us: float  # 90th percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. `peers` do the row's whole work in the same process; `bounds` do a part of it, or other work."""

    case: str
    ours_us: float
    library: str  # the implementation that ran
    floor_us: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)


def floor_us(
    *, read_bytes: float = 0, copy_bytes: float = 0, flops: float = 0, number_format: Literal["bf16", "fp8"] = "bf16"
) -> float:
    """The time that one H200 can't go below: the slowest of its memory reads, its copies and its arithmetic."""
    read = read_bytes / READ_TB_PER_S
    copy = copy_bytes / COPY_TB_PER_S
    return max(read, copy, flops / TFLOP_PER_S[number_format]) / 1e6


def compare(
    candidates: Mapping[str, Run[Inputs]],
    make_inputs: Callable[[int], Inputs],
    *,
    device: torch.device,
    bytes_per_call: int,
    num_samples: int = 50,
) -> dict[str, Measurement]:
    """Measure all candidates on equal inputs. `make_inputs(idx)` gives copy idx; a candidate returns its outputs.

    Errors: BenchmarkError names a candidate that leaves a row of an output unwritten.
    """
    samplers: dict[str, _Sampler] = {}
    for name, run in candidates.items():
        copies = [make_inputs(idx) for idx in range(num_copies(bytes_per_call, device))]
        sampler: _Sampler = _GraphSampler(run, copies) if device.type == "cuda" else _HostSampler(run, copies)
        check_written(name, sampler)
        samplers[name] = sampler
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for sample_idx in range(num_samples):
        first = sample_idx % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(samplers[name].sample_us())
    return {name: _summary(values) for name, values in samples.items()}


def num_copies(bytes_per_call: int, device: torch.device) -> int:
    """Copies of the inputs that are three times the last cache together."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CPU_CACHE_BYTES
    return min(_MAX_COPIES, max(2, math.ceil(3 * cache / max(bytes_per_call, 1))))


def check_written(name: str, sampler: "_Sampler") -> None:
    """Poison all outputs, run, and look for rows that are still poison."""
    for output in sampler.outputs:
        _rows(name, output).fill_(POISON)
    sampler.sample_us()
    for idx, output in enumerate(sampler.outputs):
        if bool((_rows(name, output) == POISON).all(dim=-1).any()):
            raise BenchmarkError(
                f"{name}: output {idx} of shape {tuple(output.shape)} has rows that were never written"
            )


def empty_kernel_us(device: torch.device) -> float:
    """What a kernel costs that does next to nothing: the part of each figure that no kernel can be without."""
    run: dict[str, Run[torch.Tensor]] = {"empty": lambda tensor: [tensor.fill_(1)]}
    found = compare(run, lambda idx: torch.zeros(1, device=device), device=device, bytes_per_call=2**22)
    return found["empty"].median_us


def write_results(
    bench: str, rows: Sequence[Row], *, device: torch.device, num_devices: int = 1, folder: Path = RESULTS
) -> Path:
    """Write results/<bench>-<device>.json anew and return its path."""
    short = device_name(device, num_devices)
    meta = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": _command(sys.orig_argv[1:]),
        "empty_kernel_us": empty_kernel_us(device),
    }
    path = folder / f"{bench}-{short}.json"
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"meta": {json.dumps(meta)},\n"rows": [\n{lines}\n]}}\n')
    return path


def device_name(device: torch.device, num_devices: int = 1) -> str:
    """The short name in file names: cpu, h200, h200-x2."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().removeprefix("nvidia ").split()[0]
    return name if num_devices == 1 else f"{name}-x{num_devices}"


class _Sampler(Protocol):
    outputs: list[torch.Tensor]

    def sample_us(self) -> float: ...


class _GraphSampler(Generic[Inputs]):
    """A candidate's calls over all copies, captured in one CUDA graph."""

    def __init__(self, run: Run[Inputs], copies: Sequence[Inputs]) -> None:
        self._copies = copies  # the graph holds addresses only
        self.outputs: list[torch.Tensor] = []
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, allocates and tunes before the capture
            for inputs in copies:
                run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for inputs in copies:
                self.outputs += run(inputs)
        self._num_replays = 1
        self.sample_us()
        self._num_replays = math.ceil(_MIN_SAMPLE_US / (self.sample_us() * len(copies)))

    def sample_us(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(self._num_replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / (self._num_replays * len(self._copies))


class _HostSampler(Generic[Inputs]):
    """A candidate's calls over all copies, one after another."""

    def __init__(self, run: Run[Inputs], copies: Sequence[Inputs]) -> None:
        self._run, self._copies = run, copies
        self.outputs = [output for inputs in copies for output in run(inputs)]
        self._num_rounds = 1
        self._num_rounds = math.ceil(_MIN_SAMPLE_US / (self.sample_us() * len(copies)))

    def sample_us(self) -> float:
        start = time.perf_counter()
        for _ in range(self._num_rounds):
            for inputs in self._copies:
                self._run(inputs)
        return (time.perf_counter() - start) * 1e6 / (self._num_rounds * len(self._copies))


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise BenchmarkError(f"{name}: an output is not contiguous, so it can't be poisoned")
    row_len = tensor.shape[-1] if tensor.ndim else 1
    return tensor.reshape(tensor.numel() // max(row_len, 1), row_len).view(torch.uint8)


def _summary(values: list[float]) -> Measurement:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Measurement(
        median_us=statistics.median(ordered), low_us=ordered[round(0.1 * last)], high_us=ordered[round(0.9 * last)]
    )


def _command(words: Sequence[str]) -> str:
    """As it was called, but for where on this machine peers are."""
    folders = {idx + 1 for idx, word in enumerate(words) if word == "--peers"}
    return " ".join(["python", *("FOLDER" if idx in folders else word for idx, word in enumerate(words))])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package, module in (("torch", "torch"), ("triton", "triton"), ("nvidia-cutlass-dsl", "cutlass")):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # copied to the path without the installer's notes
            if module in sys.modules:
                found[package] = sys.modules[module].__version__
    return found
