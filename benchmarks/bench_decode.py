"""A decode step of the whole engine on one GPU, and a prefill of 8,192 tokens, with dummy weights.

    python -m benchmarks.bench_decode [MODEL ...]        names of folders in tests/data/models; default: all
    python -m benchmarks.bench_decode llama-3-8b --batches 1 --peers

B prompts of equal length are served by the engine with decode graphs. A step's figure is the median of the host's time
between two collected steps while all B sequences decode; their mean length is 1,024 tokens. `bounds` holds what the GPU
tells by events: busy from the copy of the inputs to the copy of the tokens, and the gap before the next step. Dummy
weights send all tokens to few experts, so models with experts route uniformly.

The floor is that of the bytes read (parameters once, experts as many as B tokens hit, the KV cache of all sequences)
and of the arithmetic. A prefill has the figure of the host: from its schedule until its token has been collected.

With `--peers` transformers serves dense models at batch 1 in the same process, random weights of the same shapes, after
ours. Rows that are not measured are kept as they are in the results.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import generate_peer
from benchmarks.timing import RESULTS, BenchmarkError, Row, device_name, floor_us, write_results
from dist_infer.checkpoint.folder import ModelFolder, open_model_folder
from dist_infer.comm.agreement import ControlPlane
from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.config import SchedulerConfig
from dist_infer.dispatcher import Dispatcher, Incoming
from dist_infer.engine import Engine
from dist_infer.errors import ExitCode
from dist_infer.graphs import CudaCapture
from dist_infer.launch.channel import LocalControl
from dist_infer.launch.failure import Alarm
from dist_infer.models.registry import parse_config
from dist_infer.scheduler import Scheduler
from dist_infer.shard import Shard, ShardPlan, load_shard, plan_shard
from dist_infer.step_floor import StepFloor, routed_parameters
from dist_infer.step_meter import CudaMarks, StepTimes, TimedRunner
from dist_infer.step_runner import PreparedStep, SampledIds, StepRunner, build_step_runner
from dist_infer.types import Request, SamplingParams, StepOutput
from dist_infer.warmup import warm_up

BENCH = "bench_decode"
MODELS = Path(__file__).parent.parent / "tests" / "data" / "models"
BATCHES = (1, 64, 128)
CONTEXT = 1024
TIMED_STEPS = 48
FIRST_STEPS = 8  # before the timed ones
PREFILL = 8192
BLOCK_SIZE = 16


class Requests:
    """A frontend that hands out requests as they are put in."""

    exit_code = ExitCode.DONE
    exhausted = False

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.num_open = 0
        self._num_made = 0

    def put(self, count: int, prompt_len: int, max_tokens: int, vocab_size: int) -> None:
        """Requests of different prompts."""
        generator = torch.Generator().manual_seed(self._num_made)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        for request_id in range(self._num_made, self._num_made + count):
            prompt = torch.randint(vocab_size, (prompt_len,), generator=generator).tolist()
            self.waiting.append(Request(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling))
        self._num_made += count
        self.num_open += count

    def poll(self, room: int) -> Incoming:
        """All that wait."""
        handed, self.waiting = self.waiting, []
        return Incoming(requests=handed)

    def ready(self) -> bool:
        """Requests are put in before the engine runs."""
        return True

    def deliver(self, output: StepOutput) -> None:
        """Only ends count."""
        self.num_open -= output.finish_reason is not None

    def fail_open(self, message: str) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""


class NoWatch:
    """A world of one that nobody watches."""

    def step(self, step: int) -> None:
        """See Watch."""

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        """See Watch."""
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One rank's place among those that serve a model together."""

    mesh: Mesh
    tp: Collectives
    world: Collectives
    control: ControlPlane
    vote: Callable[[str, BaseException | None], object]
    largest: Callable[[int], int]  # of the numbers of all ranks


def alone() -> Place:
    """A world of one."""
    return Place(
        mesh=Mesh.create(world=1, rank=0),
        tp=SingleCollectives(),
        world=SingleCollectives(),
        control=LocalControl(Alarm()),
        vote=lambda stage, error: None,
        largest=lambda number: number,
    )


class Served:
    """A model with its engine, as `dist-infer run` makes it for one rank.

    Ranks: all methods are collective over the world of `place`.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        uniform_routing: bool,
        place: Place | None = None,
        batches: Sequence[int] = BATCHES,
        warms_up: bool = True,
        on_progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        """For `batches` of all groups together. Without the warm-up, prefills are not to be timed."""
        self._on_progress = on_progress
        device = torch.device("cuda", torch.cuda.current_device())
        self.place = place or alone()
        started_s = time.perf_counter()
        self.plan: ShardPlan = plan_shard(folder, self.place.mesh, dtype="bfloat16", device=device)
        self.shard: Shard = load_shard(
            self.plan,
            self.place.tp,
            world=self.place.world,
            uniform_routing=uniform_routing,
            dummy_seed=0,
            on_tensor=lambda _: None,
        )
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started_s
        on_progress("weights are loaded")
        own = [-(-batch // self.place.mesh.dp) for batch in batches]
        longest = max(PREFILL + BLOCK_SIZE, CONTEXT + TIMED_STEPS)
        num_pages = max(own) * (-(-(CONTEXT + TIMED_STEPS) // BLOCK_SIZE) + 2) + longest // BLOCK_SIZE
        self.config = SchedulerConfig(
            max_model_len=longest,
            max_num_seqs=max(own),
            max_num_tokens=PREFILL,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_pages,
            prefix_cache=False,
            depth=1,
        )
        started_s = time.perf_counter()
        inner = self._make_runner(own)
        inner.capture(CudaCapture(device), on_size=lambda size: on_progress(f"graphs of {size} rows are captured"))
        if warms_up:
            warm_up(inner, self.config, world_size=self.place.mesh.world, on_progress=on_progress)
        self.steps: list[StepTimes] = []
        self.runner: TimedRunner[PreparedStep, SampledIds] = TimedRunner(inner, CudaMarks(), self.steps.append)
        self.warm_s = time.perf_counter() - started_s
        self.requests = Requests()
        mesh = self.place.mesh
        self.engine = Engine(
            mesh=mesh,
            control=self.place.control,
            scheduler=Scheduler(self.config, mesh.dp_rank),
            runner=self.runner,
            watch=NoWatch(),
            stop_requested=lambda: False,
            vote=self.place.vote,
            depth=1,
            dispatcher=Dispatcher(self.requests, mesh.dp, 10**6) if mesh.rank == 0 else None,
        )

    def _make_runner(self, graph_sizes: Sequence[int]) -> StepRunner:
        model, plan = self.shard.model, self.plan
        if model.graph_blocker is not None:
            raise BenchmarkError(f"no graphs: {model.graph_blocker}")
        return build_step_runner(
            model,
            self.config,
            heads=plan.heads,
            tp=self.place.tp,
            dtype=plan.dtype,
            device=plan.device,
            graph_sizes=graph_sizes,
        )

    def decode(self, batch: int) -> tuple[float, float, float]:
        """Microseconds of a step on the host's clock, and of the device: busy, gap."""
        prompt_len = CONTEXT - FIRST_STEPS - TIMED_STEPS // 2
        self._put(batch, prompt_len, FIRST_STEPS + TIMED_STEPS + 4)
        own_tokens = -(-batch // self.place.mesh.dp) * prompt_len
        for step in range(-(-own_tokens // PREFILL) + FIRST_STEPS):
            self.engine.step()
            self._on_progress(f"b={batch}: step {step} before the timed ones")
        times_s = [time.perf_counter()]
        for _ in range(TIMED_STEPS):
            self.engine.step()
            times_s.append(time.perf_counter())
        busy_us, gap_us = self._device_us(TIMED_STEPS)
        self._finish()
        steps_us = [(after - before) * 1e6 for before, after in pairwise(times_s)]
        return statistics.median(steps_us), busy_us, gap_us

    def _device_us(self, num_steps: int) -> tuple[float, float]:
        """Medians of the last steps: busy, and the gap before."""
        torch.cuda.synchronize()
        self.runner.tell()
        last = self.steps[-num_steps:]
        gaps = [step.gap_us for step in last if step.gap_us is not None]
        return statistics.median(step.busy_us for step in last), statistics.median(gaps)

    def prefill(self) -> float:
        """Microseconds of a prompt of 8,192 tokens."""
        times_us = []
        for _ in range(4):
            self._put(1, PREFILL, 1)
            started_s = time.perf_counter()
            self._finish()
            times_us.append((time.perf_counter() - started_s) * 1e6)
        return statistics.median(times_us[1:])

    def _put(self, count: int, prompt_len: int, max_tokens: int) -> None:
        if self.place.mesh.rank == 0:
            self.requests.put(count, prompt_len, max_tokens, self.plan.config.vocab_size)

    def _finish(self) -> None:
        """Steps until all requests have ended, which only rank 0 sees."""
        while self.place.largest(self.requests.num_open):
            self.engine.step()
        self.steps.clear()


def decode_floor_us(floor: StepFloor, batch: int) -> float:
    """Of a step of `batch` sequences of CONTEXT tokens."""
    read_bytes = floor.read_bytes(num_tokens=batch, kv_tokens=batch * CONTEXT)
    return floor_us(read_bytes=read_bytes, flops=batch * floor.read_bytes(num_tokens=1, kv_tokens=0))


def prefill_floor_us(plan: ShardPlan, shard: Shard) -> float:
    """Of PREFILL tokens: the arithmetic of the matrices, but for the head's, and of the attention."""
    config = plan.config
    tables_bytes = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size * 2
    unused_bytes = 2 * routed_parameters(config) * (1 - StepFloor.of(plan, shard).share_hit(1))
    used_bytes = shard.parameter_bytes - tables_bytes - unused_bytes
    value_dim = config.head_dim if config.mla is None else config.mla.v_head_dim
    attention = config.num_layers * config.num_heads * (config.head_dim + value_dim) * PREFILL**2
    return floor_us(read_bytes=shard.parameter_bytes, flops=PREFILL * used_bytes + attention)


def measure(name: str, batches: Sequence[int], *, with_peers: bool) -> list[Row]:
    """The rows of a model."""
    folder = open_model_folder(MODELS / name, weights=False)
    positions = max(parse_config(folder.config).max_position_embeddings, PREFILL + BLOCK_SIZE)
    folder = replace(folder, config={**folder.config, "max_position_embeddings": positions})
    served = Served(folder, uniform_routing=True)
    sys.stdout.write(f"{name}: weights {served.load_s:.1f} s, graphs and warm-up {served.warm_s:.1f} s\n")
    rows = []
    for batch in batches:
        step_us, busy_us, gap_us = served.decode(batch)
        peers: dict[str, float] = {}
        not_run: dict[str, str] = {}
        if with_peers and batch == 1 and served.plan.config.moe is None:
            try:
                peers[generate_peer.NAME] = generate_peer.generate_step_us(
                    MODELS / name,
                    batch=batch,
                    context=CONTEXT,
                    num_first=FIRST_STEPS,
                    num_timed=TIMED_STEPS,
                    device=served.plan.device,
                )
            except ImportError as error:
                not_run[generate_peer.NAME] = str(error)
        rows.append(
            Row(
                case=f"{name} bf16 tp=1 context={CONTEXT} b={batch}",
                ours_us=step_us,
                library="graph",
                floor_us=decode_floor_us(StepFloor.of(served.plan, served.shard), batch),
                peers=peers,
                not_run=not_run,
                bounds={"GPU busy": busy_us, "gap before the next step": gap_us},
            )
        )
    rows.append(
        Row(
            case=f"{name} bf16 tp=1 prefill={PREFILL}",
            ours_us=served.prefill(),
            library="eager",
            floor_us=prefill_floor_us(served.plan, served.shard),
        )
    )
    for row in rows:
        share = 100 * (row.floor_us or 0.0) / row.ours_us
        others = ", ".join(f"{what} {value:.0f}" for what, value in (*row.bounds.items(), *row.peers.items()))
        sys.stdout.write(f"{row.case}: {row.ours_us / 1e3:.3f} ms, {share:.0f} % of floor; {others} us\n")
    sys.stdout.flush()
    return rows


def kept_rows(device: torch.device, measured: Sequence[Row]) -> list[Row]:
    """Rows that the results hold beside those that have been measured."""
    path = RESULTS / f"{BENCH}-{device_name(device)}.json"
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    cases = {row.case for row in measured}
    return [Row(**row) for row in rows if row["case"] not in cases]


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=sorted(path.name for path in MODELS.iterdir()))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, choices=BATCHES)
    parser.add_argument("--peers", action="store_true", help="serve dense models with transformers, too")
    options = parser.parse_args()
    names: list[str] = options.models
    device = torch.device("cuda", torch.cuda.current_device())
    for name in names:
        measured = measure(name, options.batches, with_peers=options.peers)
        rows = [*kept_rows(device, measured), *measured]
        path = write_results(BENCH, sorted(rows, key=lambda row: row.case), device=device)
        sys.stdout.write(f"{path}\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
