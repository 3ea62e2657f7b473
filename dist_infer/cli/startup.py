"""The start of a rank, stage after stage, for every command that serves a model.

Each stage ends with a vote, so that a rank that fails in it is named by all instead of being waited for.
"""

from collections.abc import Callable
from typing import TypeVar

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.checkpoint.model_path import find_model
from dist_infer.cli.environment import Environment
from dist_infer.cli.options import DEFAULT_KV_MEMORY_FRACTION, EngineOptions
from dist_infer.comm.mesh import Mesh
from dist_infer.config import SchedulerConfig
from dist_infer.kv_cache import KVCache
from dist_infer.launch.world import World
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.shard import Shard, ShardPlan, load_shard, max_model_len, num_kv_blocks, plan_shard
from dist_infer.step_runner import StepRunner

T = TypeVar("T")


def stage(world: World, name: str, build: Callable[[], T]) -> T:
    """What `build` makes, once it has gone well on all ranks.

    Ranks: collective over the world. Errors: VotedError on every rank, naming those that failed and why.
    """
    result: T | None = None
    failed: Exception | None = None
    try:
        with world.watchdog.long_task(name):
            result = build()
    except Exception as error:  # whatever it is, the others must learn of it
        failed = error
    world.vote(name, failed)
    return result  # type: ignore[return-value]  # the vote raises where there is none


def plan_model(options: EngineOptions, environment: Environment, world: World) -> ShardPlan:
    """The model's folder and what this rank holds of it. Ranks: collective over the world."""

    def plan() -> ShardPlan:
        mesh = Mesh.create(world=world.size, rank=world.rank, dp=options.dp, tp=options.tp, ep=options.ep)
        model = find_model(
            options.model, environment.cache_dir, on_wait=lambda: world.watchdog.progress("convert the model")
        )
        folder = open_model_folder(model.path, weights=options.load_format != "dummy", name=model.name)
        return plan_shard(folder, mesh, dtype=options.dtype, device=world.device)

    return stage(world, "read the model's folder", plan)


def load_model(options: EngineOptions, plan: ShardPlan, world: World, *, dummy_seed: int) -> Shard:
    """This rank's part of the model, filled; `dummy_seed` counts where random weights are asked for.

    Ranks: collective over the world.
    """
    communicators = world.communicators(plan.mesh)
    return stage(
        world,
        "load the model",
        lambda: load_shard(
            plan,
            communicators.tp,
            world=communicators.world,
            max_moe_tokens=options.moe_max_tokens,
            dummy_seed=dummy_seed if options.load_format == "dummy" else None,
            on_tensor=world.watchdog.progress,
        ),
    )


def agree_on_limits(options: EngineOptions, plan: ShardPlan, world: World) -> SchedulerConfig:
    """The limits of the schedulers; the ranks hold one number of KV blocks, the least that any of them has room for.

    Ranks: collective over the world.
    """
    fraction = options.kv_memory_fraction or DEFAULT_KV_MEMORY_FRACTION[plan.device.type]

    def own_blocks() -> int:
        if options.num_kv_blocks is not None:
            return options.num_kv_blocks
        return num_kv_blocks(plan, block_size=options.block_size, memory_fraction=fraction, sharers=world.local_size)

    (num_blocks,) = world.all_min([stage(world, "size the KV cache", own_blocks)])
    return stage(
        world,
        "limits",
        lambda: SchedulerConfig(
            max_model_len=max_model_len(
                plan.config, options.max_model_len, num_kv_tokens=num_blocks * options.block_size
            ),
            max_num_seqs=options.max_num_seqs,
            max_num_tokens=options.max_num_tokens,
            block_size=options.block_size,
            num_kv_blocks=num_blocks,
            prefix_cache=options.prefix_cache,
            depth=1 if plan.device.type == "cuda" else 0,
        ),
    )


def make_step_runner(plan: ShardPlan, shard: Shard, config: SchedulerConfig, world: World) -> StepRunner:
    """Model, KV cache and sampler as the engine drives them. Ranks: collective over the world."""

    def make_runner() -> Runner:
        kv_cache = KVCache(plan.config, plan.heads, config.num_kv_blocks, config.block_size, plan.dtype, plan.device)
        return Runner(shard.model, kv_cache, max_num_seqs=config.max_num_seqs, device=plan.device)

    runner = stage(world, "make the KV cache", make_runner)
    tp = world.communicators(plan.mesh).tp
    return StepRunner(runner, Sampler(tp, shard.model.vocab_range, plan.config.vocab_size))
