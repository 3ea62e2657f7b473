"""Measures which library of latent attention's decode is the fastest on this device, by heads and sequences.

It is never called while a model is served: `dist-infer tune attention` does it, and keeps what it finds in a file.

S sequences of one query each, N heads, L latent, R rotated, P plain and V value channels.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library, Phase, Target, resolve, spell
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.mla_attention import LIBRARIES, PlanFunction, plan_mla_attention

F = TypeVar("F", bound=Callable[..., object])

OP = "mla_attention"
NUM_SEQS = (1, 2, 4, 8, 16, 32, 64, 128)  # a batch takes the entry of the next larger one
CONTEXTS = (1024, 4096)
SCHEMA = 2
_LATENT, _ROTATED, _PLAIN, _VALUE = 512, 64, 128, 128  # of DeepSeek-V2 and V3
_PAGE = 64
_NUM_CALLS = 12
_NUM_SAMPLES = 7
_MARGIN = 1.02

Time = Callable[[Callable[[], object]], float]  # microseconds of a call


@dataclass(frozen=True, slots=True)
class Way(Generic[F]):
    """A library, and how it is told to go."""

    library: Library[F]
    tactic: Mapping[str, int]

    @property
    def label(self) -> str:
        """For people, and different from that of any other way."""
        return " ".join([self.library.name, *spell(self.tactic)])


def ways_of(libraries: Sequence[Library[F]]) -> list[Way[F]]:
    """Each library as it chooses for itself, then as it can be told to go."""
    own = [Way(library, {}) for library in libraries]
    return own + [Way(library, tactic) for library in libraries for tactic in library.tactics]


def measure_attention(
    target: Target,
    heads: Sequence[int],
    time_us: Time,
    *,
    libraries: Sequence[Library[PlanFunction]] = LIBRARIES,
    num_seqs: Sequence[int] | None = None,
    contexts: Sequence[int] = CONTEXTS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """The entries of this device for these numbers of heads, from the sum of the times at all contexts."""
    num_seqs = num_seqs or NUM_SEQS
    cache = torch.zeros(max(num_seqs) * max(contexts), _LATENT + _ROTATED, dtype=target.dtype, device=target.device)
    cache.normal_(generator=torch.Generator(target.device).manual_seed(0))
    found = []
    for count in heads:
        geometry = _geometry(count, target.dtype)
        own = Target(device=target.device, dtype=target.dtype, geometry=geometry)
        able = resolve(OP, libraries, own, phase=Phase.GENERATION).libraries
        ways = ways_of(tuple(library for library in able if library.graph_safe) or able)  # steps are captured
        times: list[tuple[int, dict[str, float]]] = []
        for seqs in num_seqs:
            on_progress(f"{count} heads, {seqs} sequences")
            of_way = dict.fromkeys((way.label for way in ways), 0.0)
            for context in contexts:
                for way in ways:
                    library = way.library.told(way.tactic)
                    of_way[way.label] += time_us(_call(library, cache, count, seqs, context))
            times.append((seqs, of_way))
        sizes = {name: range(geometry[name], geometry[name] + 1) for name in ("heads", "cache_bytes")}
        figures = f"us, sum over contexts of {', '.join(map(str, contexts))}"
        found += entries(target.device_name, f"{OP}.{Phase.GENERATION}", ways, sizes, "seqs", times, figures)
    return found


def _geometry(heads: int, dtype: torch.dtype) -> dict[str, int]:
    return {
        "heads": heads,
        "kv_lora_rank": _LATENT,
        "rope_dim": _ROTATED,
        "cache_bytes": dtype.itemsize,
        "batch_invariant": 0,
    }


def _call(library: Library[PlanFunction], cache: Tensor, heads: int, seqs: int, context: int) -> Callable[[], object]:
    device, dtype = cache.device, cache.dtype
    starts = np.arange(seqs + 1, dtype=np.int32)
    lens = np.full(seqs, context, np.int32)
    pages = torch.randperm(len(cache) // _PAGE, generator=torch.Generator().manual_seed(1))
    step = PagedStep(
        query_start=torch.from_numpy(starts).to(device),
        kv_lens=torch.from_numpy(lens).to(device),
        page_table=pages[: seqs * context // _PAGE].view(seqs, -1).int().to(device),
        block_size=_PAGE,
        host_query_start=starts,
        host_kv_lens=lens,
    )
    attend = plan_mla_attention(step, kv_lora_rank=_LATENT, scale=(_PLAIN + _ROTATED) ** -0.5, library=library)
    q = torch.ones(seqs, heads, _PLAIN + _ROTATED, dtype=dtype, device=device)
    kv_b = torch.full((heads, _PLAIN + _VALUE, _LATENT), _LATENT**-0.5, dtype=dtype, device=device)
    return lambda: attend(q, cache, kv_b)


def entries(
    device: str,
    op: str,
    ways: Sequence[Way[F]],
    sizes: Mapping[str, range],
    bucket: str,
    times: Sequence[tuple[int, Mapping[str, float]]],
    figures: str,
) -> list[Measured]:
    """Neighbours with the same fastest way are one entry. `times`: (size of the bucket, microseconds by way), rising.

    A library is told what to do only where that gains more than times scatter.
    """
    found: list[Measured] = []
    of_label = {way.label: way for way in ways}

    def fastest_of(of_way: Mapping[str, float]) -> str:
        return min(of_way, key=lambda label: of_way[label] * (_MARGIN if of_label[label].tactic else 1))

    first = 1
    for idx, (last, of_way) in enumerate(times):
        fastest = fastest_of(of_way)
        if idx + 1 < len(times) and fastest_of(times[idx + 1][1]) == fastest:
            continue
        shown = ", ".join(f"{label} {time:.1f}" for label, time in of_way.items())
        found.append(
            Measured(
                device=device,
                op=op,
                library=of_label[fastest].library.name,
                tactic=of_label[fastest].tactic,
                sizes={**sizes, bucket: range(first, last + 1)},
                figures=f"{figures} at {last} {bucket}: {shown}",
            )
        )
        first = last + 1
    return found


def graph_us(device: torch.device) -> Time:
    """Times a call in a CUDA graph: the median of some replays."""

    def time_us(call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_NUM_CALLS):
                call()
        samples = []
        for _ in range(_NUM_SAMPLES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(float(start.elapsed_time(end)) * 1e3 / _NUM_CALLS)
        return statistics.median(samples)

    return time_us


def to_json(found: Sequence[Measured], versions: Mapping[str, str]) -> str:
    """As `from_json` reads it."""
    listed = [
        {**asdict(entry), "sizes": {name: [values.start, values.stop] for name, values in entry.sizes.items()}}
        for entry in found
    ]
    return json.dumps({"schema": SCHEMA, "versions": dict(versions), "entries": listed}, indent=1) + "\n"


def from_json(text: str, versions: Mapping[str, str]) -> list[Measured]:
    """Errors: ValueError for what is no such file, and for one of other versions."""
    try:
        fields = json.loads(text)
        if fields["schema"] != SCHEMA:
            raise ValueError(f"it has another form, {fields['schema']} instead of {SCHEMA}")
        if fields["versions"] != dict(versions):
            raise ValueError(f"it was made with {fields['versions']}, this is {dict(versions)}")
        return [
            Measured(
                device=str(entry["device"]),
                op=str(entry["op"]),
                library=str(entry["library"]),
                tactic={str(name): int(value) for name, value in entry["tactic"].items()},
                sizes={str(name): range(int(start), int(stop)) for name, (start, stop) in entry["sizes"].items()},
                figures=str(entry["figures"]),
            )
            for entry in fields["entries"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no table of measurements: {error!r}") from error
