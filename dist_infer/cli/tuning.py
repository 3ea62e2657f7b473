"""The part of `dist-infer tune` that needs a world."""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from dist_infer.comm.all_reduce import open_peer_room
from dist_infer.comm.all_reduce_measured import TABLE
from dist_infer.comm.all_reduce_table import table_source
from dist_infer.comm.all_reduce_tuning import measure_table
from dist_infer.comm.collectives import TorchCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.symmetric import NoPeerMemoryError
from dist_infer.comm.wire import NcclWire
from dist_infer.errors import ExitCode, UsageError
from dist_infer.kernels.dispatch import Target
from dist_infer.launch.world import World, run_world

_log = logging.getLogger(__name__)
_DTYPE = torch.bfloat16


def tune_ranks(hidden_sizes: Sequence[int], max_tokens: int, output: Path | None) -> int:
    """The exit code, the same on all ranks. Ranks: collective over the world, which it opens."""
    return run_world(partial(_tune, hidden_sizes, max_tokens, output), device="auto")


def _tune(hidden_sizes: Sequence[int], max_tokens: int, output: Path | None, world: World) -> int:
    """Errors: VotedError, with the code of a wrong usage, where there is no choice between ways."""
    group = world.communicators(Mesh.create(world=world.size, rank=world.rank)).world
    if not isinstance(group, TorchCollectives) or not isinstance(group.wire, NcclWire):
        _refuse(world, "there is a choice only between several ranks with a GPU each: mpirun -n 2 dist-infer tune")
    row_bytes = max(hidden_sizes) * _DTYPE.itemsize
    try:
        room = open_peer_room(group, group.wire.group, max_tokens=max_tokens, row_bytes=row_bytes, device=world.device)
    except NoPeerMemoryError as error:
        _refuse(world, f"without peer memory there is no choice: {error}")

    def on_progress(what: str) -> None:
        world.watchdog.progress(what)
        if world.rank == 0:
            _log.info("%s", what)

    target = Target(device=world.device, dtype=_DTYPE)
    with world.watchdog.long_task("tune"):
        measured = measure_table(group, target, room, hidden_sizes=hidden_sizes, on_progress=on_progress)
    room.close()
    if world.rank == 0:
        _write(table_source({**TABLE, **measured}), output)
    return ExitCode.DONE


def _refuse(world: World, why: str) -> NoReturn:
    """Ranks: collective over the world, all for the same reason."""
    world.vote("tune", UsageError(why))
    raise AssertionError("a vote with an error fails")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)
