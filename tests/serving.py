"""Whole jobs on the ranks of a test's world: plan, load, serve, and compare on rank 0."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.comm.agreement import Decision
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import Mesh, split_sizes
from dist_infer.config import SchedulerConfig
from dist_infer.dispatcher import Dispatcher, Frontend, Incoming
from dist_infer.engine import Engine
from dist_infer.errors import ExitCode
from dist_infer.kv_cache import KVCache
from dist_infer.launch.world import World
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.scheduler import Scheduler
from dist_infer.shard import Shard, ShardPlan, load_shard, plan_shard
from dist_infer.step_runner import PreparedStep, SampledIds, StepRunner
from dist_infer.types import Batch, BatchKind, Request, StepOutput, TokenScore


@dataclass
class RequestList:
    """A frontend that has all its requests at once and keeps the answers."""

    requests: list[Request]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[TokenScore]] = field(default_factory=dict)
    prompt_scores: dict[int, list[TokenScore]] = field(default_factory=dict)
    failure: str = ""
    ended: bool = False

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE

    @property
    def exhausted(self) -> bool:
        return not self.requests and self.tokens.keys() == self.reasons.keys()

    def ready(self) -> bool:
        return not self.ended

    def poll(self, room: int) -> Incoming:
        taken, self.requests = self.requests[:room], self.requests[room:]
        self.tokens.update({request.request_id: [] for request in taken})
        self.ended = not self.requests
        return Incoming(requests=taken, end_of_input=self.ended)

    def deliver(self, output: StepOutput) -> None:
        self.tokens[output.request_id].extend(output.token_ids)
        self.scores.setdefault(output.request_id, []).extend(output.scores)
        self.prompt_scores.setdefault(output.request_id, []).extend(output.prompt_scores)
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def fail_open(self, message: str) -> None:
        self.failure = message

    def close(self) -> None:
        return None


class OpenControl:
    """The control plane of a world that goes on after a job: its farewell is an exchange like any other."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world.control, name)

    def farewell(self, code: int) -> list[int]:
        return [report["code"] for report in self._world.vote("farewell", None, {"code": code})]


class DelayedRunner(StepRunner):
    """Does something before each launch, such as sleeping."""

    def __init__(self, runner: Runner, sampler: Sampler, before_launch: Callable[[], None]) -> None:
        super().__init__(runner, sampler)
        self._before_launch = before_launch

    def launch(self, step: PreparedStep, decision: Decision) -> SampledIds:
        self._before_launch()
        return super().launch(step, decision)


@dataclass
class Served:
    """A layout that is loaded: its jobs run one after another on a fresh scheduler and cache each."""

    world: World
    plan: ShardPlan
    shard: Shard
    tp: Collectives

    def run(self, requests: Sequence[Request], *, depth: int = 0, **limits: Any) -> RequestList:
        """Serve the requests to the end; the answers are on rank 0."""
        frontend = RequestList(list(requests))
        self.serve(frontend, make_config(depth=depth, **limits))
        return frontend

    def serve(
        self, frontend: Frontend, config: SchedulerConfig, before_launch: Callable[[], None] | None = None
    ) -> None:
        """Serve what rank 0's frontend gives to its end. `before_launch` may delay this rank."""
        plan, world = self.plan, self.world
        scheduler = Scheduler(config, plan.mesh.dp_rank)
        engine = Engine(
            mesh=plan.mesh,
            control=OpenControl(world),
            scheduler=scheduler,
            runner=DelayedRunner(self.runner(config), self.sampler(), before_launch or (lambda: None)),
            watch=world.watchdog,
            stop_requested=world.signals.stop_requested,
            vote=world.vote,
            depth=config.depth,
            dispatcher=Dispatcher(frontend, plan.mesh.dp, max_inflight=1000) if world.rank == 0 else None,
        )
        assert engine.run() == ExitCode.DONE
        assert scheduler.num_free_blocks == config.num_kv_blocks

    def runner(self, config: SchedulerConfig) -> Runner:
        plan = self.plan
        cache = KVCache(plan.config, plan.heads, config.num_kv_blocks, config.block_size, plan.dtype, plan.device)
        return Runner(self.shard.model, cache, max_num_seqs=config.max_num_seqs, device=plan.device)

    def sampler(self) -> Sampler:
        return Sampler(self.tp, self.shard.model.vocab_range, self.plan.config.vocab_size)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of every position of one sequence in a single prefill. Shapes: -> [T, V], on every rank."""
        config = make_config(num_kv_blocks=-(-len(token_ids) // 16), max_num_tokens=len(token_ids))
        runner = self.runner(config)
        own = runner.run(runner.prepare(prefill_batch(token_ids)))
        return self.tp.all_gather(own.t().contiguous(), split_sizes(self.plan.config.vocab_size, self.tp.size)).t()


def load(
    world: World,
    folder: Path,
    *,
    tp: int | None = None,
    dp: int | None = None,
    dtype: str = "float64",
    seed: int | None = None,
    ep: int | None = None,
    max_moe_tokens: int | None = None,
) -> Served:
    """Load a model folder in one layout. Ranks: collective over the world."""
    mesh = Mesh.create(world=world.size, rank=world.rank, tp=tp, dp=dp, ep=ep)
    model_folder = open_model_folder(folder, weights=seed is None)
    plan = plan_shard(model_folder, mesh, dtype=dtype, device=world.device)
    collectives = world.communicators(mesh)
    shard = load_shard(
        plan,
        collectives.tp,
        world=collectives.world,
        max_moe_tokens=max_moe_tokens,
        dummy_seed=seed,
        on_tensor=world.watchdog.progress,
    )
    return Served(world, plan, shard, collectives.tp)


def make_config(**changes: Any) -> SchedulerConfig:
    """A scheduler configuration large enough for tests."""
    values: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_tokens": 256,
        "block_size": 16,
        "num_kv_blocks": 256,
        "depth": 0,
    }
    return SchedulerConfig(**(values | changes))


def prefill_batch(token_ids: Sequence[int]) -> Batch:
    """One sequence whose every position gets logits, in pages 0, 1, 2 ... of 16 tokens."""
    T = len(token_ids)
    rows = np.arange(T, dtype=np.int64)
    return Batch(
        kind=BatchKind.PREFILL,
        request_ids=np.zeros(1, np.int64),
        token_ids=np.array(token_ids, np.int64),
        positions=rows,
        slots=rows,
        query_start=np.array([0, T], np.int32),
        kv_lens=np.array([T], np.int32),
        pages=np.arange(-(-T // 16), dtype=np.int32)[None],
        state_rows=np.zeros(1, np.int32),
        logit_rows=rows,
        logit_seqs=np.zeros(T, np.int32),
        temperature=np.zeros(T),
        top_k=np.zeros(T, np.int32),
        top_p=np.ones(T),
        seeds=np.zeros(T, np.int64),
        draw_positions=rows + 1,
    )


def on_rank_0(world: World, make: Callable[[], object]) -> None:
    """Run `make` on rank 0 while the others wait for it. Ranks: collective over the world."""
    error = None
    if world.rank == 0:
        try:
            make()
        except Exception as failed:
            error = failed
    world.vote("on rank 0", error)


def log_probabilities(logits: Tensor) -> Tensor:
    """In float64. Shapes: [T, V] -> [T, V]."""
    return torch.log_softmax(logits.double(), dim=-1)
