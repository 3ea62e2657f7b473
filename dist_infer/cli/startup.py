"""The start of a rank, stage after stage, for every command that serves a model.

Each stage ends with a vote, so that a rank that fails in it is named by all instead of being waited for.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.checkpoint.model_path import find_model
from dist_infer.cli.environment import Environment
from dist_infer.cli.kernel_tuning import read_tuned
from dist_infer.cli.options import DEFAULT_KV_MEMORY_FRACTION, EngineOptions
from dist_infer.cli.stage import stage
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.peer_collectives import open_peer_axes
from dist_infer.config import SchedulerConfig
from dist_infer.graphs import CudaCapture, default_sizes
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.launch.world import World
from dist_infer.memory import num_sharers
from dist_infer.sampler import Sampler
from dist_infer.shard import Shard, ShardPlan, load_shard, max_model_len, num_kv_blocks, plan_shard
from dist_infer.step_runner import StepRunner, build_step_runner
from dist_infer.warmup import measure_bytes, warm_up

_log = logging.getLogger(__name__)


def plan_model(options: EngineOptions, environment: Environment, world: World) -> ShardPlan:
    """The model's folder and what this rank holds of it. Ranks: collective over the world."""
    tuned = read_tuned(environment.cache_dir, world)

    def plan() -> ShardPlan:
        mesh = Mesh.create(world=world.size, rank=world.rank, dp=options.dp, tp=options.tp, ep=options.ep)
        model = find_model(
            options.model, environment.cache_dir, on_wait=lambda: world.watchdog.progress("convert the model")
        )
        folder = open_model_folder(model.path, weights=options.load_format != "dummy", name=model.name)
        return plan_shard(
            folder,
            mesh,
            dtype=options.dtype,
            device=world.device,
            max_model_len=options.max_model_len,
            kv_cache_dtype=options.kv_cache_dtype,
            batch_invariant=options.batch_invariant,
            kernel_orders=options.kernel_orders,
            tuned=tuned,
        )

    return stage(world, "read the model's folder", plan)


def load_model(
    options: EngineOptions, plan: ShardPlan, world: World, *, dummy_seed: int, uniform_routing: bool = False
) -> Shard:
    """This rank's part of the model, filled; `dummy_seed` counts where random weights are asked for.

    `uniform_routing` deals rows to experts evenly, for benchmarks with such weights.

    Ranks: collective over the world.
    """
    axes = world.communicators(plan.mesh)
    tp, everyone = axes.tp, axes.world
    if plan.device.type == "cuda" and options.peer_memory:
        tp, everyone = open_peer_axes(
            axes,
            plan.mesh,
            Target(device=plan.device, dtype=plan.dtype),
            max_tokens=options.max_num_tokens,
            max_seqs=options.max_num_seqs,
            hidden=plan.config.hidden_size,
            top_k=plan.config.moe.top_k if plan.config.moe else None,
        )
    return stage(
        world,
        "load the model",
        lambda: load_shard(
            plan,
            tp,
            world=everyone,
            max_moe_tokens=options.moe_max_tokens,
            uniform_routing=uniform_routing,
            weight_format=None if options.quantize == "none" else WeightFormat(options.quantize),
            dummy_seed=dummy_seed if options.load_format == "dummy" else None,
            on_tensor=world.watchdog.progress,
        ),
    )


def agree_on_limits(options: EngineOptions, plan: ShardPlan, shard: Shard, world: World) -> SchedulerConfig:
    """The limits of the schedulers; the ranks hold one number of KV blocks, the least that any of them has room for.

    On a GPU the largest step is run to see what it leaves for them.

    Ranks: collective over the world.
    """
    num_blocks = options.num_kv_blocks
    if num_blocks is None:
        reserved_bytes = 0
        if plan.device.type == "cuda":
            reserved_bytes = _measure(options, plan, shard, world)
            gc.collect()
            torch.cuda.empty_cache()
        fraction = options.kv_memory_fraction or DEFAULT_KV_MEMORY_FRACTION[plan.device.type]

        def own_blocks() -> int:
            return num_kv_blocks(
                plan,
                block_size=options.block_size,
                memory_fraction=fraction,
                sharers=num_sharers(world.device, local_size=world.local_size, gpu_shared=world.gpu_shared),
                reserved_bytes=reserved_bytes,
            )

        (num_blocks,) = world.all_min([stage(world, "size the KV cache", own_blocks)])
    return stage(world, "limits", lambda: _limits(options, plan, num_kv_blocks=num_blocks))


def _limits(options: EngineOptions, plan: ShardPlan, *, num_kv_blocks: int) -> SchedulerConfig:
    num_kv_tokens = num_kv_blocks * options.block_size
    return SchedulerConfig(
        max_model_len=max_model_len(plan.config, options.max_model_len, num_kv_tokens=num_kv_tokens),
        max_num_seqs=options.max_num_seqs,
        max_num_tokens=options.max_num_tokens,
        block_size=options.block_size,
        num_kv_blocks=num_kv_blocks,
        prefix_cache=options.prefix_cache,
        depth=1 if plan.device.type == "cuda" else 0,
    )


def _measure(options: EngineOptions, plan: ShardPlan, shard: Shard, world: World) -> int:
    """Bytes that steps take beside parameters and cache. Ranks: collective over the world."""
    sizes, _ = _graph_sizes(options, plan, shard, world)
    # The longest sequence that the model allows, on a cache of one block: steps of the warm-up write nothing.
    limits = _limits(options, plan, num_kv_blocks=2**40)
    runner = stage(
        world,
        "make a runner to measure",
        lambda: _build_runner(plan, shard, replace(limits, num_kv_blocks=1), sizes[-2:]),
    )
    return stage(
        world,
        "measure the largest step",
        lambda: measure_bytes(
            runner,
            limits,
            plan.device,
            world_size=world.size,
            num_graphs=len(sizes),
            on_progress=world.watchdog.progress,
        ),
    )


def make_step_runner(
    options: EngineOptions, plan: ShardPlan, shard: Shard, config: SchedulerConfig, world: World
) -> StepRunner:
    """Model, KV cache and sampler as the engine drives them, on a GPU warmed up and with graphs.

    Ranks: collective over the world.
    """
    sizes, reason = _graph_sizes(options, plan, shard, world)
    runner = stage(world, "make the KV cache", lambda: _build_runner(plan, shard, config, sizes))
    if plan.device.type != "cuda":
        return runner
    progress = world.watchdog.progress
    if sizes:
        capture = CudaCapture(plan.device)
        stage(
            world,
            "capture graphs",
            lambda: runner.capture(capture, on_size=lambda size: progress(f"graph of {size}")),
        )
    stage(world, "warm up", lambda: warm_up(runner, config, world_size=world.size, on_progress=progress))
    if world.rank == 0:
        _announce(sizes, reason)
    return runner


def _graph_sizes(
    options: EngineOptions, plan: ShardPlan, shard: Shard, world: World
) -> tuple[tuple[int, ...], str | None]:
    """Rows of the decode graphs, none and the reason where steps run eagerly; all ranks do the same.

    Ranks: collective over the world.
    """
    reason = shard.model.graph_blocker or _sampler(plan, shard).graph_blocker
    if plan.device.type != "cuda":
        reason = "graphs need a GPU"
    elif options.eager:
        reason = "--eager"
    (all_can,) = world.all_min([int(reason is None)])
    if not all_can:
        return (), reason or "another rank can't capture graphs"
    return options.graph_batch_sizes or default_sizes(options.max_num_seqs), None


def _announce(sizes: Sequence[int], reason: str | None) -> None:
    if reason is not None:
        _log.warning("decode steps are launched kernel by kernel: %s", reason)
        return
    _log.info(
        "decode steps of up to %d sequences are replayed as graphs of %s; edits of logits and log probabilities are"
        " computed behind them, kernel by kernel",
        sizes[-1],
        ", ".join(map(str, sizes)),
    )


def _build_runner(plan: ShardPlan, shard: Shard, config: SchedulerConfig, graph_sizes: Sequence[int]) -> StepRunner:
    """Ranks: local."""
    return build_step_runner(
        shard.model,
        config,
        heads=plan.heads,
        tp=shard.tp,
        dtype=plan.dtype,
        device=plan.device,
        graph_sizes=graph_sizes,
        kernel_orders=plan.kernel_orders,
        cache_dtype=plan.cache_dtype,
    )


def kernel_choices(plan: ShardPlan, shard: Shard) -> tuple[str, ...]:
    """A line for each kernel library that the layers and the sampler have chosen. Ranks: local."""
    of_sampler: list[str] = []
    _sampler(plan, shard, of_sampler.append)
    return (*shard.choices, *of_sampler)


def _sampler(plan: ShardPlan, shard: Shard, on_choice: Callable[[str], None] = lambda _: None) -> Sampler:
    """Ranks: local."""
    return Sampler.choosing(
        shard.tp,
        shard.model.vocab_range,
        plan.config.num_sampled_ids,
        device=plan.device,
        dtype=plan.dtype,
        kernel_orders=plan.kernel_orders,
        on_choice=on_choice,
    )
