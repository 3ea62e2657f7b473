"""What a step costs the host, the model left out: news, schedule, record, inputs, table, commit, delivery.

    python -m dist_infer.launch.mpirun -n 2 -- python -m benchmarks.bench_step

The first rank measures steps of 64 and 256 sequences that decode, in a world of its own; `bounds` holds the parts. Then
all ranks measure the news and the agreement of a step between them. Sequences are at all places of their blocks, so
every step does the same work, and the time of a part that a tenth of the steps stay below is its figure: the rest shows
the machine's other work.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from benchmarks.timing import BenchmarkError, Row, write_results
from dist_infer.comm.agreement import EAGER, Agreement, ControlPlane, Record
from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import HeadShard, Mesh
from dist_infer.config import ModelConfig, RopeConfig, SchedulerConfig
from dist_infer.dispatcher import Dispatcher, Incoming
from dist_infer.errors import ExitCode
from dist_infer.kv_cache import KVCache
from dist_infer.launch.channel import LocalControl
from dist_infer.launch.failure import Alarm
from dist_infer.launch.world import World, run_world
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.scheduler import Scheduler, batch_digest
from dist_infer.step_runner import StepRunner
from dist_infer.types import Batch, BatchKind, Int64Array, News, Request, SamplingParams, StepOutput

LIMITS_US = {64: 300.0, 256: 1000.0}  # of the parts below
BOUNDED_PARTS = ("schedule", "record", "inputs", "table", "commit")
LIMIT_OF_AGREEMENT_US = 50.0
PROMPT_LEN = 300
BLOCK_SIZE = 16
NUM_STEPS = 1000
VOCAB_SIZE = 1000
CPU = torch.device("cpu")
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
)


class Requests:
    """A frontend that has all its requests at once and does nothing with answers."""

    exit_code = ExitCode.DONE
    exhausted = False

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def poll(self, room: int) -> Incoming:
        """All of them, the first time."""
        handed, self._requests = self._requests, []
        return Incoming(requests=handed)

    def ready(self) -> bool:
        """Not needed: the loop below never sleeps."""
        return True

    def deliver(self, output: StepOutput) -> None:
        """Answers are the dispatcher's and the meter's; texts are not measured here."""

    def fail_open(self, message: str) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""


class Clock:
    """Times of the parts of many steps. Units: microseconds."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)
        self._last_s = time.perf_counter()

    def start(self) -> None:
        """What came before belongs to no part."""
        self._last_s = time.perf_counter()

    def mark(self, part: str) -> None:
        """What has passed since the last mark was this part."""
        now = time.perf_counter()
        self.parts[part].append((now - self._last_s) * 1e6)
        self._last_s = now

    def figures(self) -> dict[str, float]:
        """The tenth of each part."""
        return {part: sorted(times)[len(times) // 10] for part, times in self.parts.items()}


class Host:
    """The host side of one rank, as the engine drives it, without a model."""

    def __init__(self, num_seqs: int) -> None:
        max_len = PROMPT_LEN + BLOCK_SIZE + NUM_STEPS + 8
        num_pages = -(-max_len // BLOCK_SIZE)
        num_blocks = num_seqs * (num_pages + 1)
        self._config = SchedulerConfig(
            max_model_len=max_len,
            max_num_seqs=num_seqs,
            max_num_tokens=max_len * num_seqs,
            block_size=BLOCK_SIZE,
            num_kv_blocks=num_blocks,
        )
        sampling = SamplingParams(max_tokens=NUM_STEPS + 8, temperature=0.7)
        requests = [
            Request(
                request_id=idx,
                prompt_ids=tuple((idx + token) % VOCAB_SIZE for token in range(PROMPT_LEN + idx % BLOCK_SIZE)),
                sampling=sampling,
            )
            for idx in range(num_seqs)
        ]
        mesh = Mesh.create(world=1, rank=0)
        self._scheduler = Scheduler(self._config, 0)
        self._dispatcher = Dispatcher(Requests(requests), 1, 10**6)
        self._control = LocalControl(Alarm())
        self._agreement = Agreement(mesh, self._control, 0)
        cache = KVCache(MODEL, HeadShard(range(1), range(1)), 1, BLOCK_SIZE, torch.float32, CPU)
        runner = Runner(None, cache, max_num_seqs=num_seqs, device=CPU, max_pages=num_pages)  # type: ignore[arg-type]
        self._runner = StepRunner(runner, Sampler(SingleCollectives(), range(VOCAB_SIZE), VOCAB_SIZE))
        self._step = 0
        self.clock = Clock()

    def step(self) -> None:
        """One step, in the engine's order."""
        clock = self.clock
        clock.start()
        self._step += 1
        news = self._dispatcher.news(drain=False)
        self._control.broadcast_news(news.encode())
        clock.mark("news")
        self._scheduler.apply(news, drain=False)
        batch = self._scheduler.schedule()
        if batch is None:
            raise BenchmarkError(f"step {self._step} has nothing to do")
        clock.mark("schedule")
        self._agreement.post(record_of(self._step, batch, self._scheduler.live, self._agreement))
        clock.mark("record")
        self._runner.prepare(batch)
        clock.mark("inputs")
        self._agreement.wait(end_of_input=False)
        clock.mark("table")
        tokens: Int64Array = batch.draw_positions % VOCAB_SIZE  # in place of the model
        clock.start()
        outputs = self._scheduler.commit(batch, tokens, None)
        clock.mark("commit")
        self._dispatcher.deliver(outputs)
        clock.mark("deliver")


def record_of(step: int, batch: Batch, live: int, agreement: Agreement) -> Record:
    """As the engine makes it."""
    return Record(
        step=step,
        kind=batch.kind,
        tokens=batch.num_tokens,
        sequences=batch.num_seqs,
        live=live,
        graph_bucket=EAGER,
        error=False,
        stop=False,
        woke=False,
        schedule_digest=batch_digest(batch),
        decision_digest=agreement.last.digest(),
    )


def measure_steps(num_seqs: int) -> Row:
    """Steps in which all sequences decode."""
    host = Host(num_seqs)
    for _ in range(2):  # the prompts, and a first decode
        host.step()
    host.clock.parts.clear()
    for _ in range(NUM_STEPS):
        host.step()
    parts = host.clock.figures()
    return Row(case=f"sequences={num_seqs}", ours_us=sum(parts.values()), library="python", bounds=parts)


def measure_agreement(world: World) -> Row:
    """An empty news and the records of a step, on all ranks."""
    mesh = Mesh.create(world=world.size, rank=world.rank)
    agreement = Agreement(mesh, world.control, 0)
    exchange = _root_exchange(world.control) if world.rank == 0 else _exchange(world.control)
    record = {"kind": BatchKind.DECODE, "tokens": 1, "sequences": 1, "live": 1, "graph_bucket": EAGER}
    clock = Clock()
    for step in range(1, NUM_STEPS + 1):
        clock.start()
        exchange()
        agreement.post(
            Record(
                **record,  # type: ignore[arg-type]
                step=step,
                error=False,
                stop=False,
                woke=False,
                schedule_digest=0,
                decision_digest=agreement.last.digest(),
            )
        )
        agreement.wait(end_of_input=False)
        clock.mark("agreement")
    (figure,) = clock.figures().values()
    return Row(case=f"agreement ranks={world.size}", ours_us=figure, library="mpi" if world.size > 1 else "python")


def _root_exchange(control: ControlPlane) -> Callable[[], None]:
    data = News().encode()
    return lambda: control.broadcast_news(data)


def _exchange(control: ControlPlane) -> Callable[[], None]:
    return lambda: _ignore(News.decode(control.receive_news(lambda: None, idle=False)))


def _ignore(_: object) -> None:
    return None


def bench(world: World) -> ExitCode:
    """Measures and, on rank 0, writes the results. Errors: BenchmarkError where a bound is missed."""
    torch.set_num_threads(1)
    rows = [measure_steps(num_seqs) for num_seqs in LIMITS_US] if world.rank == 0 else []
    world.vote("steps are measured", None)
    rows.append(measure_agreement(world))
    if world.rank == 0:
        path = write_results("bench_step", rows, device=CPU)
        sys.stdout.write(f"{path}\n" + "".join(f"{describe(row)}\n" for row in rows))
        check(rows)
    return ExitCode.DONE


def describe(row: Row) -> str:
    """The row in words."""
    parts = ", ".join(f"{part} {value:.1f}" for part, value in row.bounds.items())
    return f"{row.case}: {row.ours_us:.1f} us" + (f" ({parts})" if parts else "")


def check(rows: list[Row]) -> None:
    """Errors: BenchmarkError naming the bound that is missed."""
    limits = {f"sequences={num_seqs}": limit for num_seqs, limit in LIMITS_US.items()}
    for row in rows:
        limit = limits.get(row.case, LIMIT_OF_AGREEMENT_US)
        found = sum(row.bounds[part] for part in BOUNDED_PARTS) if row.bounds else row.ours_us
        if found > limit:
            raise BenchmarkError(f"{row.case} takes {found:.0f} us, the bound is {limit:g} us")


if __name__ == "__main__":
    sys.exit(run_world(bench))
