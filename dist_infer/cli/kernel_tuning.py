"""`dist-infer tune attention` and `tune moe`: measured by rank 0, kept in the cache folder, read as every job starts.

All ranks of a job take what rank 0 has read: a table that only some of them had would make them choose differently.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dist_infer import __version__
from dist_infer.cache_folder import open_private_folder
from dist_infer.cli.environment import Environment
from dist_infer.cli.stage import stage
from dist_infer.errors import ExitCode, UsageError
from dist_infer.intake.record_file import write_atomically
from dist_infer.kernels.dispatch import Target, spell
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.tune import Time, from_json, graph_us, measure_attention, to_json
from dist_infer.kernels.tune_moe import Layer, measure_experts
from dist_infer.launch.world import World, run_world

_log = logging.getLogger(__name__)
_KINDS = ("attention", "moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is to be measured: by `measure` (target, clock, progress), for sizes that are all in one of `replaced`."""

    kind: str
    measure: Callable[[Target, Time, Callable[[str], None]], Sequence[Measured]]
    replaced: Sequence[Mapping[str, int]]


def tune_attention(heads: Sequence[int], environment: Environment) -> int:
    """The exit code, the same on all ranks. Ranks: collective over the world, which it opens."""
    return run_world(partial(_tune, attention_of(heads), environment), device="auto")


def tune_moe(layers: Sequence[Layer], environment: Environment) -> int:
    """The exit code, the same on all ranks. Ranks: collective over the world, which it opens."""
    return run_world(partial(_tune, experts_of(layers), environment), device="auto")


def attention_of(heads: Sequence[int]) -> Tuning:
    """Decode of latent attention with so many heads."""

    def measure(target: Target, time_us: Time, on_progress: Callable[[str], None]) -> list[Measured]:
        return measure_attention(target, heads, time_us, on_progress=on_progress)

    return Tuning(kind="attention", measure=measure, replaced=[{"heads": count} for count in heads])


def experts_of(layers: Sequence[Layer]) -> Tuning:
    """The experts that a rank holds of such layers."""

    def measure(target: Target, time_us: Time, on_progress: Callable[[str], None]) -> list[Measured]:
        return measure_experts(target, layers, time_us, on_progress=on_progress)

    return Tuning(kind="moe", measure=measure, replaced=[layer.geometry for layer in layers])


def _tune(tuning: Tuning, environment: Environment, world: World) -> int:
    stage(world, f"tune {tuning.kind}", lambda: _measure(tuning, environment, world) if world.rank == 0 else None)
    return ExitCode.DONE


def _measure(tuning: Tuning, environment: Environment, world: World) -> None:
    if world.device.type != "cuda":
        raise UsageError(f"there is a choice between libraries of {tuning.kind} on a GPU only")

    def on_progress(what: str) -> None:
        world.watchdog.progress(what)
        _log.info("%s", what)

    path = open_private_folder(environment.cache_dir) / _name(tuning.kind)  # before time is spent
    target = Target(device=world.device, dtype=torch.bfloat16)
    found = tuning.measure(target, graph_us(world.device), on_progress)
    earlier = _read(environment.cache_dir, tuning.kind)
    kept = [entry for entry in earlier if not _is_replaced(entry, target.device_name, tuning)]
    write_atomically(path, to_json([*found, *kept], _versions()).encode())
    for entry in found:
        sizes = ", ".join(f"{name} {_in_words(values)}" for name, values in entry.sizes.items())
        way = " ".join([entry.library, *spell(entry.tactic)])
        _log.info("%s, %s: %s (%s)", entry.op, sizes, way, entry.figures)
    _log.info("kept in %s for all later jobs", path)


def _in_words(values: range) -> str:
    return str(values.start) if len(values) == 1 else f"{values.start} to {values.stop - 1}"


def _is_replaced(entry: Measured, device: str, tuning: Tuning) -> bool:
    starts = {name: values.start for name, values in entry.sizes.items()}
    return entry.device == device and any(known.items() <= starts.items() for known in tuning.replaced)


def read_tuned(cache_dir: Path, world: World) -> list[Measured]:
    """What rank 0 finds in its cache folder, on all ranks; nothing, with the reason logged, where it can't be used.

    Ranks: collective over the world.
    """
    found = [entry for kind in _KINDS for entry in _read(cache_dir, kind)] if world.rank == 0 else []
    reports = world.vote("read what was tuned", None, {"tuned": to_json(found, {})})
    return from_json(reports[0]["tuned"], {})


def _read(cache_dir: Path, kind: str) -> list[Measured]:
    path = cache_dir / _name(kind)
    try:
        return from_json(path.read_text(), _versions())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.warning("%s is not used, run `dist-infer tune %s` again: %s", path, kind, error)
        return []


def _name(kind: str) -> str:
    return f"tuned-{kind}.json"


def _versions() -> dict[str, str]:
    return {"dist_infer": __version__, "torch": str(torch.__version__)}
