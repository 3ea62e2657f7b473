"""`dist-infer run` on one rank: open the world, load the model, serve the batch, leave.

Each stage of the start ends with a vote, so that a rank that fails in it is named by all instead of being waited for.
"""

import logging
import os
import platform
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from dist_infer import __version__
from dist_infer.cli.environment import Environment
from dist_infer.cli.options import RunOptions
from dist_infer.cli.startup import agree_on_limits, load_model, make_step_runner, plan_model, stage
from dist_infer.cli.summary import RunSummary
from dist_infer.comm.mesh import Mesh
from dist_infer.config import SchedulerConfig
from dist_infer.dispatcher import Dispatcher
from dist_infer.engine import Engine
from dist_infer.errors import ExitCode, UsageError
from dist_infer.intake.batch_job import BatchJob
from dist_infer.intake.fingerprint import digest_model
from dist_infer.intake.job_files import FileOptions, JobFiles
from dist_infer.intake.line_filter import Shard
from dist_infer.intake.sampling_defaults import read_sampling_defaults
from dist_infer.intake.text import collect_eos_ids, open_text
from dist_infer.intake.validate import RequestLimits
from dist_infer.launch.world import World, run_world
from dist_infer.log import ProgressView, open_progress, setup_logging
from dist_infer.metrics import ServingMeter
from dist_infer.scheduler import Scheduler, check_fits
from dist_infer.shard import Shard as ModelShard
from dist_infer.shard import ShardPlan

_log = logging.getLogger(__name__)
_INFLIGHT_PER_SEQ = 4  # requests alive on rank 0 for each sequence of a step: enough to balance and never run dry


def run_job(options: RunOptions, environment: Environment) -> int:
    """The exit code of the job, the same on every rank."""
    return run_world(
        partial(_serve, options, environment), device=options.device, step_timeout_s=options.step_timeout_s
    )


def _serve(options: RunOptions, environment: Environment, world: World) -> int:
    """Everything between the opening of the world and its farewell. Ranks: collective over the world."""
    setup_logging(level=options.log_level, host=world.host, rank=world.rank, size=world.size)
    summary = RunSummary(options.summary if world.rank == 0 else None)
    files = stage(
        world, "open input and output", lambda: _open_files(options, environment, world) if world.rank == 0 else None
    )
    try:
        stage(world, "check the summary's place", lambda: summary.check([options.input, options.output]))
        code = _serve_files(options, environment, world, files, summary)
        summary.mark("serve")
        summary.write(code)
        return code
    except BaseException as error:
        summary.mark("serve" if summary.job is not None else "until the failure")
        summary.write(int(getattr(error, "exit_code", ExitCode.ERROR)), f"{type(error).__name__}: {error}")
        raise
    finally:
        if files is not None:
            files.close()


def _serve_files(
    options: RunOptions, environment: Environment, world: World, files: JobFiles | None, summary: RunSummary
) -> int:
    """Rank 0 has the files. Ranks: collective over the world."""
    seed = _agree_on_seed(options, world, files)
    plan = plan_model(options, environment, world)
    stage(world, "compare with the earlier run", lambda: _check_model(options, plan, files))
    summary.mark("open")
    shard = load_model(options, plan, world, dummy_seed=seed)
    summary.mark("load")
    config = agree_on_limits(options, plan, world)
    stage(world, "compare limits with the earlier run", lambda: _check_limits(config, files))
    step_runner = make_step_runner(plan, shard, config, world)
    progress = open_progress(
        under_launcher=environment.launcher is not None, answers_on_stdout=options.output in (None, "-")
    )
    job = stage(
        world,
        "open the tokenizer",
        lambda: _open_batch(options, plan, config, files, progress) if files is not None else None,
    )
    reports = _report_ready(world, plan, shard, config, seed)
    stage(world, "begin the output", lambda: _begin_output(options, plan, config, files, reports))
    summary.facts = _facts(plan, config, seed)
    summary.num_resumed = files.num_resumed if files is not None else 0
    scheduler = Scheduler(config, plan.mesh.dp_rank)
    engine = Engine(
        mesh=plan.mesh,
        control=world.control,
        scheduler=scheduler,
        runner=step_runner,
        watch=world.watchdog,
        stop_requested=world.signals.stop_requested,
        vote=world.vote,
        depth=config.depth,
        dispatcher=None if job is None else _make_dispatcher(job, options, plan.mesh, summary.meter),
        on_end=lambda: _gather_reports(options, world, scheduler, summary),
    )
    summary.job = job
    summary.mark("prepare")
    summary.meter.start()
    try:
        return int(engine.run())
    finally:
        progress.close()


def _open_files(options: RunOptions, environment: Environment, world: World) -> JobFiles:
    files = JobFiles.open(
        FileOptions(
            input_path=options.input,
            prompts=options.prompts,
            output_path=options.output,
            overwrite=options.overwrite,
            resume=options.resume,
            shard=Shard(*options.shard) if options.shard is not None else None,
            seed=options.seed,
            job_id=environment.job_id,
        ),
        on_progress=lambda: world.watchdog.progress("digest of the input"),
    )
    if files.summary:
        _log.info("%s", files.summary)
    return files


def _agree_on_seed(options: RunOptions, world: World, files: JobFiles | None) -> int:
    """Rank 0's seed, once all ranks have the same options: each has read the command line, and maybe a file, itself."""
    reports = world.vote(
        "agree on options",
        None,
        {"host": world.host, "options": repr(options), "seed": None if files is None else files.seed},
    )

    def check() -> None:
        for rank, report in enumerate(reports):
            if report["options"] != reports[0]["options"]:
                raise UsageError(
                    f"rank {rank} on host {report['host']} has other options than rank 0: "
                    "all ranks need the same command line and the same --config file"
                )

    stage(world, "agree on options", check)
    return int(reports[0]["seed"])


def _check_model(options: RunOptions, plan: ShardPlan, files: JobFiles | None) -> None:
    if files is None or not files.keeps_run_file:
        return
    files.check(
        {
            "model": digest_model(plan.folder.path, weights=options.load_format != "dummy"),
            "load_format": options.load_format,
            "dtype": _name(plan.dtype),
        }
    )


def _check_limits(config: SchedulerConfig, files: JobFiles | None) -> None:
    if files is not None:
        files.check({"max_model_len": config.max_model_len})  # of requests without max_tokens


def _begin_output(
    options: RunOptions,
    plan: ShardPlan,
    config: SchedulerConfig,
    files: JobFiles | None,
    reports: Sequence[Mapping[str, object]],
) -> None:
    if files is not None:
        files.begin(
            {
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "hosts": [report["host"] for report in reports],
                "devices": [report["device"] for report in reports],
                "options": asdict(options),
                "model_path": str(plan.folder.path),
                **_facts(plan, config, files.seed),
            }
        )


def _versions() -> dict[str, str]:
    return {"dist_infer": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open_batch(
    options: RunOptions,
    plan: ShardPlan,
    config: SchedulerConfig,
    files: JobFiles,
    progress: ProgressView,
) -> BatchJob:
    text = open_text(plan.folder.path)
    return BatchJob(
        lines=files.lines,
        answers=files.answers,
        text=text,
        limits=RequestLimits(
            vocab_size=plan.config.vocab_size,
            max_model_len=config.max_model_len,
            check_fits=lambda request: check_fits(request, config),
            defaults=read_sampling_defaults(plan.folder.generation_config),
        ),
        eos_token_ids=collect_eos_ids(plan.config.eos_token_ids, plan.folder.generation_config, text),
        model_name=plan.folder.name,
        run_seed=files.seed,
        num_failed_before=files.num_failed,
        progress=progress,
    )


def _make_dispatcher(job: BatchJob, options: RunOptions, mesh: Mesh, meter: ServingMeter) -> Dispatcher:
    max_inflight = options.max_inflight or _INFLIGHT_PER_SEQ * options.max_num_seqs * mesh.dp
    return Dispatcher(job, mesh.dp, max_inflight=max_inflight, meter=meter)


def _facts(plan: ShardPlan, config: SchedulerConfig, seed: int) -> dict[str, object]:
    """What a job is made of, for people."""
    return {
        "model": plan.folder.name,
        "dtype": _name(plan.dtype),
        "seed": seed,
        "layout": {"tp": plan.mesh.tp, "dp": plan.mesh.dp, "ep": plan.mesh.ep},
        "limits": asdict(config),
        "versions": _versions(),
    }


def _gather_reports(options: RunOptions, world: World, scheduler: Scheduler, summary: RunSummary) -> None:
    """What each rank knows for the summary; a rank that can't tell brings its error to the vote.

    Ranks: collective over the world.
    """
    if options.summary is None:
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


def _report_ready(
    world: World, plan: ShardPlan, shard: ModelShard, config: SchedulerConfig, seed: int
) -> list[dict[str, Any]]:
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
            _name(plan.dtype),
            config.max_model_len,
            config.num_kv_blocks,
            config.block_size,
            seed,
        )
    return reports
