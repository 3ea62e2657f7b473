"""`dist-infer bench` on one rank: open the world, load the model, serve a made-up load, show the figures."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from dist_infer.cli.bench_options import DEFAULT_INPUT_LEN, DEFAULT_NUM_PROMPTS, DEFAULT_OUTPUT_LEN, BenchOptions
from dist_infer.cli.bench_steps import BenchSteps
from dist_infer.cli.bench_table import render
from dist_infer.cli.environment import Environment
from dist_infer.cli.serving import agree_on_kernels, agree_on_options, describe_job, report_ready, request_limits, serve
from dist_infer.cli.stage import stage
from dist_infer.cli.startup import agree_on_limits, load_model, make_step_runner, plan_model
from dist_infer.cli.summary import RunSummary
from dist_infer.config import SchedulerConfig
from dist_infer.errors import RequestError, UsageError
from dist_infer.intake.bench_dataset import FileReader, RandomLengths, random_requests, warmup_requests
from dist_infer.intake.bench_job import BenchJob, poisson_arrivals
from dist_infer.intake.text import collect_eos_ids, open_text
from dist_infer.launch.world import World, run_world
from dist_infer.log import setup_logging
from dist_infer.shard import ShardPlan
from dist_infer.types import Request


def run_bench(options: BenchOptions, environment: Environment) -> int:
    """The exit code of the job, the same on every rank."""
    return run_world(
        partial(_bench, options, environment),
        device=options.device,
        step_timeout_s=options.step_timeout_s,
        share_gpu=options.share_gpu,
    )


def _bench(options: BenchOptions, environment: Environment, world: World) -> int:
    """Everything between the opening of the world and its farewell. Ranks: collective over the world."""
    setup_logging(level=options.log_level, host=world.host, rank=world.rank, size=world.size)
    summary = RunSummary(options.result, writes=world.rank == 0)
    summary.wanted = True  # by the table
    stage(world, "check the result's place", lambda: summary.check([options.dataset]))
    code = summary.told(lambda: _measure(options, environment, world, summary))
    if world.rank == 0:
        Console().print(render(summary.fields(code, None)))
    return code


def _measure(options: BenchOptions, environment: Environment, world: World, summary: RunSummary) -> int:
    seed = agree_on_options(options, world, seed=options.seed)
    plan = plan_model(options, environment, world)
    stage(world, "check the routing", lambda: _check_routing(options, plan))
    summary.mark("open")
    shard = load_model(options, plan, world, dummy_seed=seed, uniform_routing=options.uniform_routing)
    agree_on_kernels(plan, shard, world)
    summary.mark("load")
    config = agree_on_limits(options, plan, shard, world)
    runner = make_step_runner(options, plan, shard, config, world)
    summary.mark("warm up")
    steps = BenchSteps(plan, shard, config, runner, world)
    job = stage(
        world,
        "make the requests",
        lambda: _make_job(options, plan, config, summary, steps) if world.rank == 0 else None,
    )
    report_ready(world, plan, shard, config, seed)
    summary.facts |= describe_job(plan, shard, config, seed)
    summary.job = job

    def end() -> None:
        summary.facts["steps"] = steps.fields()

    return serve(
        world, plan, config, steps.runner, summary, frontend=job, max_inflight=options.max_inflight, on_end=end
    )


def _check_routing(options: BenchOptions, plan: ShardPlan) -> None:
    if options.uniform_routing and plan.config.moe is None:
        raise UsageError("--uniform-routing is for models with experts, this one has none; leave it out")


def _make_job(
    options: BenchOptions, plan: ShardPlan, config: SchedulerConfig, summary: RunSummary, steps: BenchSteps
) -> BenchJob:
    seed = options.seed or 0
    requests = _requests(options, plan, config, seed)
    warmup = warmup_requests(requests, count=options.warmup, vocab_size=plan.config.vocab_size, seed=seed)
    arrivals_s = None
    if options.request_rate is not None:
        arrivals_s = poisson_arrivals(len(requests), options.request_rate, seed)

    def begin() -> None:
        summary.mark("warm up")
        steps.report.start()

    summary.facts = {"bench": _describe(options, requests)}
    return BenchJob(
        requests,
        warmup=warmup,
        arrivals_s=arrivals_s,
        meter=summary.meter,
        clock=summary.clock,
        on_warm=begin,
    )


def _requests(options: BenchOptions, plan: ShardPlan, config: SchedulerConfig, seed: int) -> list[Request]:
    """The measured ones; ids of the warm-up come before theirs."""
    limits = request_limits(plan, config)
    if options.dataset is not None:
        text = open_text(plan.folder.path)
        reader = FileReader(
            text=text,
            limits=limits,
            eos_token_ids=collect_eos_ids(plan.config.eos_token_ids, plan.folder.generation_config, text),
            seed=seed,
            output_len=options.output_len,
        )
        return reader.read(Path(options.dataset), first_id=options.warmup, count=options.num_prompts)
    requests = random_requests(
        RandomLengths(
            input_len=options.input_len or DEFAULT_INPUT_LEN,
            output_len=options.output_len or DEFAULT_OUTPUT_LEN,
            spread=options.range_ratio or 0.0,
            shared_prefix_len=options.prefix_len or 0,
        ),
        first_id=options.warmup,
        count=options.num_prompts or DEFAULT_NUM_PROMPTS,
        vocab_size=plan.config.vocab_size,
        random=np.random.default_rng(seed % 2**64),
    )
    for request in requests:
        try:
            limits.check_fits(request)
        except RequestError as error:
            raise UsageError(f"--input-len and --output-len: {error}") from error
    return requests


def _describe(options: BenchOptions, requests: Sequence[Request]) -> dict[str, object]:
    input_lens = [len(request.prompt_ids) for request in requests]
    output_lens = [request.sampling.max_tokens for request in requests]
    return {
        "dataset": options.dataset or "random",
        "requests": len(requests),
        "warmup_requests": options.warmup,
        "request_rate": options.request_rate,
        "uniform_routing": options.uniform_routing,
        "input_tokens": _spread(input_lens),
        "output_tokens_at_most": _spread(output_lens),
    }


def _spread(lens: Sequence[int]) -> dict[str, float]:
    return {"mean": sum(lens) / len(lens), "min": min(lens), "max": max(lens)}
