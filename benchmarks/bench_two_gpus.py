"""Decode steps of the whole engine on two GPUs beside one of them, with dummy weights.

    python -m dist_infer.launch.mpirun -n 2 -- python -m benchmarks.bench_two_gpus [MODEL ...] [--layout NAME]

Models are folders in tests/data/models; bench_decode says how a step is measured. First each GPU serves the model by
itself, both at the same time; then they serve it together: one sequence on one group of two ranks (tp=2), which hold
half of the experts each (ep=2) or half of each expert (ep=1), and 128 sequences on two groups that share the experts
(dp=2 ep=2). A figure is that of the slower rank. The peer is one GPU with the same sequences in the same process:
tokens a second grow as the time shrinks.

Rows of models and layouts that are not asked for are kept as they are in the results.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.bench_decode import CONTEXT, MODELS, PREFILL, Place, Served
from benchmarks.timing import RESULTS, Row, device_name, write_results
from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.comm.expert_peers import ExpertCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.peer_collectives import PeerCollectives, open_peer_axes
from dist_infer.config import ModelConfig
from dist_infer.errors import ExitCode, UsageError
from dist_infer.kernels.dispatch import Target
from dist_infer.launch.world import World, run_world
from dist_infer.models.registry import parse_config

BENCH = "bench_two_gpus"


@dataclass(frozen=True, slots=True)
class Layout:
    """How two ranks serve a batch."""

    name: str
    dp: int
    ep: int
    batch: int


DENSE = (Layout("tp=2", 1, 2, 1),)
WITH_EXPERTS = (Layout("tp=2 ep=2", 1, 2, 1), Layout("tp=2 ep=1", 1, 1, 1), Layout("dp=2 ep=2", 2, 2, 128))


def together(world: World, layout: Layout, config: ModelConfig) -> Place:
    """Both ranks serve one model. Ranks: collective over the world."""
    mesh = Mesh.create(world=world.size, rank=world.rank, dp=layout.dp, ep=layout.ep)
    axes = world.communicators(mesh)
    tp, everyone = open_peer_axes(
        axes,
        mesh,
        Target(device=world.device, dtype=torch.bfloat16),
        max_tokens=PREFILL,
        max_seqs=layout.batch // layout.dp,
        hidden=config.hidden_size,
        top_k=config.moe.top_k if config.moe else None,
    )
    return Place(
        mesh=mesh,
        tp=tp,
        world=everyone,
        control=world.control,
        vote=world.vote,
        largest=lambda number: -world.all_min([-number])[0],
    )


def measure(name: str, only: str | None, world: World, say: Callable[[str], None]) -> Iterator[Row]:
    """The rows of a model, of one layout if it is named; `say` hears how far it is.

    Ranks: collective over the world.
    """
    folder = open_model_folder(MODELS / name, weights=False)
    config = parse_config(folder.config)
    positions = max(config.max_position_embeddings, 2 * PREFILL)
    folder = replace(folder, config={**folder.config, "max_position_embeddings": positions})
    has_experts = config.moe is not None
    layouts = [layout for layout in (WITH_EXPERTS if has_experts else DENSE) if only in (None, layout.name)]
    if not layouts:
        return
    batches = sorted({layout.batch for layout in layouts})
    say(f"{name} on one GPU")
    served = Served(folder, uniform_routing=has_experts, batches=batches, warms_up=False, on_progress=say)
    one_us = {batch: slowest(world, served.decode(batch)[0]) for batch in batches}
    say(", ".join(f"b={batch}: {step_us:.1f} us" for batch, step_us in one_us.items()))
    del served
    for layout in layouts:
        free_memory()
        say(f"{name} {layout.name}")
        place = together(world, layout, config)
        served = Served(
            folder,
            uniform_routing=has_experts,
            place=place,
            batches=[layout.batch],
            warms_up=False,
            on_progress=say,
        )
        step_us, busy_us, gap_us = served.decode(layout.batch)
        yield Row(
            case=f"{name} bf16 {layout.name} context={CONTEXT} b={layout.batch}",
            ours_us=slowest(world, step_us),
            library="peer memory" if is_peered(place) else "nccl",
            peers={"one GPU": one_us[layout.batch]},
            bounds={"GPU busy": busy_us, "gap before the next step": gap_us},
        )
        del served
        free_memory()
        close(place)


def is_peered(place: Place) -> bool:
    """What a decode step exchanges goes through peer memory."""
    return isinstance(place.tp, PeerCollectives) or isinstance(place.world, ExpertCollectives)


def close(place: Place) -> None:
    """Give peer memory back. Ranks: collective over the world."""
    if isinstance(place.tp, PeerCollectives):
        place.tp.close()
    if isinstance(place.world, ExpertCollectives):
        place.world.peer_rows.close()


def slowest(world: World, time_us: float) -> float:
    """The largest of all ranks' times. Ranks: collective over the world."""
    return -world.all_min([-round(time_us * 1e3)])[0] / 1e3


def free_memory() -> None:
    """What a model has left, graphs included."""
    gc.collect()
    torch.cuda.empty_cache()


def kept_rows(device: torch.device, case: str) -> list[Row]:
    """Rows of all cases but this one that the results hold."""
    path = RESULTS / f"{BENCH}-{device_name(device, 2)}.json"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return [Row(**row) for row in rows if row["case"] != case]


def run(names: list[str], only: str | None, world: World) -> int:
    """Measures all models and writes after each row. Ranks: collective over the world."""
    if world.size != 2 or world.device.type != "cuda" or world.gpu_shared:
        raise UsageError("bench_two_gpus needs two ranks with a GPU each")
    started_s = time.monotonic()

    def say(what: str) -> None:
        if world.rank == 0:
            sys.stderr.write(f"[{time.monotonic() - started_s:.1f} s] {what}\n")

    for name in names:
        for row in measure(name, only, world, say):
            if world.rank == 0:
                gain = row.peers["one GPU"] / row.ours_us
                sys.stdout.write(f"{row.case}: {row.ours_us / 1e3:.3f} ms, {gain:.2f} times the speed of one GPU\n")
                sys.stdout.write(f"    {dict(row.peers)}, {dict(row.bounds)}\n")
                sys.stdout.flush()
                rows = sorted([*kept_rows(world.device, row.case), row], key=lambda row: row.case)
                write_results(BENCH, rows, device=world.device, num_devices=2)
        free_memory()
    return ExitCode.DONE


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=sorted(path.name for path in MODELS.iterdir()))
    parser.add_argument("--layout", help="one of those in the case names, such as 'dp=2 ep=2'; default: all")
    options = parser.parse_args()
    sys.exit(run_world(partial(run, options.models, options.layout), device="cuda"))


if __name__ == "__main__":
    main()
