"""`dist-infer run` on one rank: open the world, load the model, serve the batch, leave.

Each stage of the start ends with a vote, so that a rank that fails in it is named by all instead of being waited for.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial

from dist_infer.cli.environment import Environment
from dist_infer.cli.options import RunOptions
from dist_infer.cli.serving import (
    agree_on_kernels,
    agree_on_options,
    describe_job,
    dtype_name,
    report_ready,
    request_limits,
    serve,
)
from dist_infer.cli.stage import stage
from dist_infer.cli.startup import agree_on_limits, load_model, make_step_runner, plan_model
from dist_infer.cli.summary import RunSummary
from dist_infer.config import SchedulerConfig
from dist_infer.errors import DistInferError
from dist_infer.intake.batch_job import BatchJob
from dist_infer.intake.fingerprint import digest_model
from dist_infer.intake.job_files import FileOptions, JobFiles
from dist_infer.intake.line_filter import Shard
from dist_infer.intake.text import collect_eos_ids, open_text
from dist_infer.launch.world import World, run_world
from dist_infer.log import ProgressView, open_progress, setup_logging
from dist_infer.shard import ShardPlan

_log = logging.getLogger(__name__)


def run_job(options: RunOptions, environment: Environment) -> int:
    """The exit code of the job, the same on every rank."""
    return run_world(
        partial(_serve, options, environment),
        device=options.device,
        step_timeout_s=options.step_timeout_s,
        share_gpu=options.share_gpu,
    )


def _serve(options: RunOptions, environment: Environment, world: World) -> int:
    """Everything between the opening of the world and its farewell. Ranks: collective over the world."""
    setup_logging(level=options.log_level, host=world.host, rank=world.rank, size=world.size)
    summary = RunSummary(options.summary, writes=world.rank == 0)
    files = stage(
        world, "open input and output", lambda: _open_files(options, environment, world) if world.rank == 0 else None
    )
    try:
        stage(world, "check the summary's place", lambda: summary.check([options.input, options.output]))
        return summary.told(lambda: _serve_files(options, environment, world, files, summary))
    finally:
        if files is not None:
            files.close()


def _serve_files(
    options: RunOptions, environment: Environment, world: World, files: JobFiles | None, summary: RunSummary
) -> int:
    """Rank 0 has the files. Ranks: collective over the world."""
    seed = agree_on_options(options, world, seed=None if files is None else files.seed)
    plan = plan_model(options, environment, world)
    stage(world, "compare with the earlier run", lambda: _check_model(options, plan, files))
    summary.mark("open")
    shard = load_model(options, plan, world, dummy_seed=seed)
    agree_on_kernels(plan, shard, world)
    summary.mark("load")
    config = agree_on_limits(options, plan, shard, world)
    stage(world, "compare limits with the earlier run", lambda: _check_limits(config, files))
    step_runner = make_step_runner(options, plan, shard, config, world)
    summary.mark("warm up")
    progress = open_progress(
        under_launcher=environment.launcher is not None, answers_on_stdout=options.output in (None, "-")
    )
    job = stage(
        world,
        "open the tokenizer",
        lambda: _open_batch(options, plan, config, files, progress) if files is not None else None,
    )
    reports = report_ready(world, plan, shard, config, seed)
    facts = describe_job(plan, shard, config, seed)
    stage(world, "begin the output", lambda: _begin_output(options, plan, facts, files, reports))
    summary.facts = facts
    summary.num_resumed = files.num_resumed if files is not None else 0
    summary.job = job
    try:
        code = serve(
            world,
            plan,
            config,
            step_runner,
            summary,
            frontend=job,
            max_inflight=options.max_inflight,
            grace_s=options.grace_s,
        )
    finally:
        progress.close()
    if files is not None:
        _write_end(files, code)
    return code


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


def _check_model(options: RunOptions, plan: ShardPlan, files: JobFiles | None) -> None:
    if files is None or not files.keeps_run_file:
        return
    files.check(
        {
            "model": digest_model(plan.folder.path, weights=options.load_format != "dummy"),
            "load_format": options.load_format,
            "dtype": dtype_name(plan.dtype),
            "quantize": options.quantize,
            "kv_cache_dtype": options.kv_cache_dtype,
        }
    )


def _check_limits(config: SchedulerConfig, files: JobFiles | None) -> None:
    if files is not None:
        files.check({"max_model_len": config.max_model_len})  # of requests without max_tokens


def _begin_output(
    options: RunOptions,
    plan: ShardPlan,
    facts: Mapping[str, object],
    files: JobFiles | None,
    reports: Sequence[Mapping[str, object]],
) -> None:
    if files is not None:
        files.begin(
            {
                "created": _now(),
                "hosts": [report["host"] for report in reports],
                "devices": [report["device"] for report in reports],
                "options": asdict(options),
                "model_path": str(plan.folder.path),
                **facts,
            }
        )


def _write_end(files: JobFiles, code: int) -> None:
    """All is answered and the ranks have parted: what is wrong now can only be told."""
    try:
        files.end({"exit_code": int(code), "time": _now()})
    except DistInferError as error:
        _log.warning("%s", error)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


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
        limits=request_limits(plan, config),
        eos_token_ids=collect_eos_ids(plan.config.eos_token_ids, plan.folder.generation_config, text),
        model_name=plan.folder.name,
        run_seed=files.seed,
        num_failed_before=files.num_failed,
        progress=progress,
    )
