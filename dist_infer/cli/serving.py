"""What commands that serve a model have in common: equal options, reports of the ranks, the engine.

What takes a world is collective over it.
"""

import logging
import os
import platform
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from dist_infer import __version__
from dist_infer.cli.options import EngineOptions
from dist_infer.cli.stage import stage
from dist_infer.cli.startup import kernel_choices
from dist_infer.cli.summary import RunSummary
from dist_infer.config import SchedulerConfig
from dist_infer.dispatcher import Dispatcher, Frontend
from dist_infer.engine import Engine, StepRunner
from dist_infer.errors import UsageError
from dist_infer.intake.sampling_defaults import read_sampling_defaults
from dist_infer.intake.validate import RequestLimits
from dist_infer.kernels.orders import SAME_ON_ALL_RANKS
from dist_infer.launch.world import World
from dist_infer.scheduler import Scheduler, check_fits
from dist_infer.shard import Shard, ShardPlan
from dist_infer.step_report import libraries_by_op

_log = logging.getLogger(__name__)
_INFLIGHT_PER_SEQ = 4  # requests alive on rank 0 for each sequence of a step: enough to balance and never run dry


def agree_on_options(options: EngineOptions, world: World, *, seed: int | None) -> int:
    """Rank 0's seed, once all ranks have the same options: each has read the command line, and maybe a file, itself.

    Errors: UsageError, voted.
    """
    reports = world.vote("agree on options", None, {"host": world.host, "options": repr(options), "seed": seed})

    def check() -> None:
        for rank, report in enumerate(reports):
            if report["options"] != reports[0]["options"]:
                raise UsageError(
                    f"rank {rank} on host {report['host']} has other options than rank 0: "
                    "all ranks need the same command line and the same --config file"
                )

    stage(world, "agree on options", check)
    return int(reports[0]["seed"])


def request_limits(plan: ShardPlan, config: SchedulerConfig) -> RequestLimits:
    """What a request is held to."""
    return RequestLimits(
        vocab_size=plan.config.vocab_size,
        max_model_len=config.max_model_len,
        check_fits=lambda request: check_fits(request, config),
        defaults=read_sampling_defaults(plan.folder.generation_config),
    )


def serve(
    world: World,
    plan: ShardPlan,
    config: SchedulerConfig,
    runner: StepRunner,
    summary: RunSummary,
    *,
    frontend: Frontend | None,
    max_inflight: int | None,
    grace_s: float | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> int:
    """Steps until all is answered; the exit code of all. Rank 0 has the frontend.

    `on_end` is called on all ranks behind the last step of a job that has not failed.
    """
    dispatcher: Dispatcher | None = None
    if frontend is not None:
        room = max_inflight or _INFLIGHT_PER_SEQ * config.max_num_seqs * plan.mesh.dp
        dispatcher = Dispatcher(frontend, plan.mesh.dp, max_inflight=room, meter=summary.meter, grace_s=grace_s)
    scheduler = Scheduler(config, plan.mesh.dp_rank)

    def end() -> None:
        on_end()
        gather_reports(world, scheduler, summary)

    engine = Engine(
        mesh=plan.mesh,
        control=world.control,
        scheduler=scheduler,
        runner=runner,
        watch=world.watchdog,
        stop_requested=world.signals.stop_requested,
        vote=world.vote,
        depth=config.depth,
        dispatcher=dispatcher,
        on_end=end,
    )
    summary.mark("prepare")
    summary.meter.start()
    return int(engine.run())


def agree_on_kernels(plan: ShardPlan, shard: Shard, world: World) -> None:
    """Rank 0 tells what was chosen; an op whose results must be the same on all ranks has one library on all.

    Errors: UsageError, voted, naming a rank whose host has other packages or another device.
    """
    lines = kernel_choices(plan, shard)
    chosen = libraries_by_op(lines)
    reports = world.vote("choose kernels", None, {"host": world.host, "lines": lines, "chosen": chosen})

    def check() -> None:
        for rank, report in enumerate(reports):
            for op in SAME_ON_ALL_RANKS:
                if report["chosen"].get(op) != reports[0]["chosen"].get(op):
                    raise UsageError(_other_library(op, rank, report, reports[0]))

    stage(world, "choose kernels", check)
    if world.rank != 0:
        return
    for line in dict.fromkeys(lines):
        _log.info("kernels: %s", line)
    ops = {op for name in chosen for op in (name, name.split(".")[0])}
    for name in plan.kernel_orders:
        if name not in ops:
            _log.warning("--kernels %s=%s changes nothing: this model has no such op", name, plan.kernel_orders[name])


def _other_library(op: str, rank: int, *reports: Mapping[str, Any]) -> str:
    told = [next((line for line in report["lines"] if line.startswith(f"{op}: ")), "none") for report in reports]
    return (
        f"rank {rank} on host {reports[0]['host']} has chosen another library than rank 0 ({told[0]}, against"
        f" {told[1]}): install the same packages on all hosts, or name one with --kernels {op}=LIST"
    )


def describe_job(plan: ShardPlan, shard: Shard, config: SchedulerConfig, seed: int) -> dict[str, object]:
    """What a job is made of, for people."""
    return {
        "model": plan.folder.name,
        "dtype": dtype_name(plan.dtype),
        "seed": seed,
        "layout": {"tp": plan.mesh.tp, "dp": plan.mesh.dp, "ep": plan.mesh.ep},
        "limits": asdict(config),
        "kernels": [*dict.fromkeys(kernel_choices(plan, shard))],
        "versions": {"dist_infer": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
    }


def gather_reports(world: World, scheduler: Scheduler, summary: RunSummary) -> None:
    """What each rank knows for the summary; a rank that can't tell brings its error to the vote."""
    if not summary.wanted:
        return
    report: dict[str, object] = {}
    failed: Exception | None = None
    try:
        report = _describe_rank(world, scheduler)
    except Exception as error:  # whatever it is, the others wait for this rank in the vote
        failed = error
    summary.reports = [*world.vote("summary", failed, report)]


def _describe_rank(world: World, scheduler: Scheduler) -> dict[str, object]:
    on_gpu = world.device.type == "cuda"
    counters = scheduler.counters
    return {
        "rank": world.rank,
        "host": world.host,
        "device": str(world.device),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": torch.cuda.max_memory_allocated(world.device) if on_gpu else None,
        "kv_peak_blocks": scheduler.peak_blocks,
        "steps": counters.steps,
        "preemptions": counters.preemptions,
        "admitted_tokens": counters.admitted_tokens,
        "prefix_cached_tokens": counters.cached_tokens,
    }


def report_ready(
    world: World, plan: ShardPlan, shard: Shard, config: SchedulerConfig, seed: int
) -> Sequence[Mapping[str, Any]]:
    """One line a rank, from rank 0; `make demo` reads them."""
    reports = world.vote(
        "ready",
        None,
        {
            "ready rank": world.rank,
            "host": world.host,
            "pid": os.getpid(),
            "device": str(world.device),
            "parameter_bytes": shard.parameter_bytes,
            "copied_bytes": shard.copied_bytes,
            "model_bytes": shard.model_bytes,
        },
    )
    if world.rank == 0:
        for report in reports:
            _log.info("%s", " ".join(f"{name}={value}" for name, value in report.items()))
        mesh = plan.mesh
        _log.info(
            "tp=%d dp=%d ep=%d dtype=%s max_model_len=%d num_kv_blocks=%d block_size=%d seed=%d",
            mesh.tp,
            mesh.dp,
            mesh.ep,
            dtype_name(plan.dtype),
            config.max_model_len,
            config.num_kv_blocks,
            config.block_size,
            seed,
        )
    return reports


def dtype_name(dtype: torch.dtype) -> str:
    """As options spell it."""
    return str(dtype).removeprefix("torch.")
