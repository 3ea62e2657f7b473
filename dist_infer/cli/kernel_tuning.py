"""`dist-infer tune attention`: measured by rank 0, kept in the cache folder, read at the start of every job.

All ranks of a job take what rank 0 has read: a table that only some of them had would make them choose differently.
"""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from dist_infer import __version__
from dist_infer.cache_folder import open_private_folder
from dist_infer.cli.environment import Environment
from dist_infer.cli.stage import stage
from dist_infer.errors import ExitCode, UsageError
from dist_infer.intake.record_file import write_atomically
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.tune import from_json, graph_us, measure_attention, to_json
from dist_infer.launch.world import World, run_world

_log = logging.getLogger(__name__)
_NAME = "tuned-attention.json"


def tune_attention(heads: Sequence[int], environment: Environment) -> int:
    """The exit code, the same on all ranks. Ranks: collective over the world, which it opens."""
    return run_world(partial(_tune, heads, environment), device="auto")


def _tune(heads: Sequence[int], environment: Environment, world: World) -> int:
    stage(world, "tune attention", lambda: _measure(heads, environment, world) if world.rank == 0 else None)
    return ExitCode.DONE


def _measure(heads: Sequence[int], environment: Environment, world: World) -> None:
    if world.device.type != "cuda":
        raise UsageError("there is a choice between libraries of attention on a GPU only")

    def on_progress(what: str) -> None:
        world.watchdog.progress(what)
        _log.info("%s", what)

    target = Target(device=world.device, dtype=torch.bfloat16)
    found = measure_attention(target, heads, graph_us(world.device), on_progress=on_progress)
    kept = [entry for entry in _read(environment.cache_dir) if not _is_replaced(entry, target.device_name, heads)]
    path = open_private_folder(environment.cache_dir) / _NAME
    write_atomically(path, to_json([*found, *kept], _versions()).encode())
    for entry in found:
        seqs = entry.sizes["seqs"]
        _log.info(
            "%s of %d to %d sequences: %s (%s)", entry.op, seqs.start, seqs.stop - 1, entry.library, entry.figures
        )
    _log.info("kept in %s for all later jobs", path)


def _is_replaced(entry: Measured, device: str, heads: Sequence[int]) -> bool:
    return entry.device == device and entry.sizes.get("heads", range(0)).start in heads


def read_tuned(cache_dir: Path, world: World) -> list[Measured]:
    """What rank 0 finds in its cache folder, on all ranks; nothing, with the reason logged, where it can't be used.

    Ranks: collective over the world.
    """
    text = to_json(_read(cache_dir), {}) if world.rank == 0 else None
    reports = world.vote("read what was tuned", None, {"tuned": text})
    return from_json(reports[0]["tuned"], {})


def _read(cache_dir: Path) -> list[Measured]:
    path = cache_dir / _NAME
    try:
        return from_json(path.read_text(), _versions())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.warning("%s is not used, run `dist-infer tune attention` again: %s", path, error)
        return []


def _versions() -> dict[str, str]:
    return {"dist_infer": __version__, "torch": str(torch.__version__)}
