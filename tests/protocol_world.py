"""A world of ranks in one process: engines in threads over a control plane in memory, a model and a frontend that play
a script, and what must hold after every run.
"""

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.comm.mesh import Mesh
from dist_infer.config import SchedulerConfig
from dist_infer.dispatcher import Dispatcher, Incoming
from dist_infer.engine import Engine
from dist_infer.errors import ExitCode, PeerFailedError
from dist_infer.scheduler import Scheduler
from dist_infer.types import Batch, BatchKind, Int64Array, Request, SamplingParams, StepOutput
from tests.memory_control import BrokenError, DiedError, HangError, Hub, MemoryControl, VotedError

EOS = 7


@dataclass
class Tokens:
    runner: "FakeRunner"
    count: int
    ids: Int64Array

    def ready(self) -> bool:
        return self.runner.hub.all_posted(self.count)

    def numpy(self) -> Int64Array:
        self.runner.world.fault("collect", self.runner.rank)
        return self.ids

    def scores(self) -> None:
        return None


class FakeRunner:
    """Two collectives a step whose sizes come from the decision; token ids that depend on request and position only."""

    def __init__(self, world: "World", rank: int, mesh: Mesh) -> None:
        self.world, self.hub, self.rank, self.mesh = world, world.hub, rank, mesh

    def graph_bucket(self, batch: Batch) -> int:
        return batch.num_tokens if batch.kind == BatchKind.DECODE and batch.num_tokens <= 2 else EAGER

    def prepare(self, batch: Batch) -> Batch:
        self.world.fault("prepare", self.rank)
        self.world.check_batch(batch, self.rank)
        return batch

    def sizes(self, batch: Batch, decision: Decision) -> object:
        """What travels in the collectives of this step, the same on every rank."""
        if decision.graph_bucket != EAGER:
            return ("graph", decision.graph_bucket)
        return ("eager", tuple(max(tokens, 1) for tokens in decision.rank_tokens))

    def launch(self, batch: Batch, decision: Decision) -> Tokens:
        self.world.fault("launch", self.rank)
        count = 0
        for name in ("forward", "sample"):
            count = self.hub.post(self.rank, (decision.step, name, self.sizes(batch, decision)))
            if self.world.depth == 0:
                self.hub.wait(lambda: self.hub.all_posted(count), what=f"rank {self.rank}: {name}")  # noqa: B023
        return Tokens(self, count, self.world.tokens(batch))


@dataclass
class Script:
    """A frontend that plays a script: `arrivals[i]` comes at the i-th poll, an abort after so many tokens."""

    world: "World"
    arrivals: list[list[Request]]
    aborts_after: dict[int, int] = field(default_factory=dict)
    ends: bool = True
    got: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    closed: bool = False
    ended: bool = False

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DONE

    @property
    def open(self) -> set[int]:
        return set(self.got) - set(self.reasons) - self.aborted - set(self.failed)

    @property
    def exhausted(self) -> bool:
        return not self.arrivals and not self.open

    def ready(self) -> bool:
        return bool(self.arrivals) or (self.ends and not self.ended)

    def poll(self, room: int) -> Incoming:
        self.world.fault("news", 0)
        requests = self.arrivals.pop(0) if self.arrivals and room else []
        for request in requests:
            self.got[request.request_id] = []
        aborts = [r for r, after in self.aborts_after.items() if r in self.open and len(self.got[r]) >= after]
        self.aborted.update(aborts)
        self.world.abort_step.update(dict.fromkeys(aborts, self.world.controls[0].num_records + 1))
        end = self.ends and not self.arrivals and not self.ended
        self.ended = self.ended or end
        return Incoming(requests=requests, aborts=aborts, end_of_input=end)

    def deliver(self, output: StepOutput) -> None:
        self.world.fault("output", 0)
        if output.request_id in self.aborted:
            return
        if output.request_id in self.reasons:
            raise self.world.found("a token after the end")
        self.got[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            self.reasons[output.request_id] = output.finish_reason

    def fail_open(self, message: str) -> None:
        for request_id in self.open:
            self.failed[request_id] = message

    def close(self) -> None:
        self.world.fault("close", 0)
        self.closed = True


class Watch:
    def step(self, step: int) -> None:
        return None

    @contextmanager
    def sleeping(self) -> Iterator[None]:
        yield


@dataclass
class World:
    """`ranks` engines; `faults` maps (point, rank) to the visit at which `raise_` is raised there."""

    ranks: int = 2
    dp: int = 1
    depth: int = 0
    arrivals: Sequence[Sequence[Request]] = ()
    true_len: dict[int, int] = field(default_factory=dict)  # tokens until EOS, by request id
    aborts_after: dict[int, int] = field(default_factory=dict)
    ends: bool = True
    faults: dict[tuple[str, int], tuple[int, BaseException]] = field(default_factory=dict)
    # (point, rank) -> visit at which the rank gets its stop signal
    stops: dict[tuple[str, int], int] = field(default_factory=dict)
    # what happens, one after another, when nothing moves: (stop, error or die, rank) or (arrive, index into `late`)
    when_idle: Sequence[tuple[str, int]] = ()
    late: Sequence[Request] = ()
    num_kv_blocks: Callable[[int], int] = lambda rank: 8
    jitter_seed: int | None = None
    make_engine: Callable[..., Engine] = Engine
    make_runner: Callable[..., FakeRunner] = FakeRunner
    make_control: Callable[..., MemoryControl] = MemoryControl
    make_scheduler: Callable[..., Scheduler] = Scheduler

    def __post_init__(self) -> None:
        self.hub = Hub(self.ranks)
        self.abort_step: dict[int, int] = {}
        self.controls: dict[int, MemoryControl] = {}
        self.stopped: set[int] = set()
        self.killed: set[int] = set()
        self.broken_while_idle: set[int] = set()
        for event in self.when_idle:
            self.hub.when_idle.append(partial(self._happens, *event))
        self.visits: dict[tuple[str, int], int] = defaultdict(int)
        self.schedulers: list[Scheduler] = []
        self.codes: dict[int, int] = {}
        self.errors: dict[int, BaseException] = {}
        self.script = Script(self, [list(a) for a in self.arrivals], dict(self.aborts_after), self.ends)
        self.requests = {r.request_id: r for a in (*self.arrivals, self.late) for r in a}

    # ---- what the fakes call ----

    def fault(self, point: str, rank: int) -> None:
        self.visits[point, rank] += 1
        if self.jitter_seed is not None:
            delay = random.Random(f"{self.jitter_seed} {point} {rank} {self.visits[point, rank]}").random()
            time.sleep(0.002 * delay if delay > 0.7 else 0)
        if self.visits[point, rank] > 3000:
            raise self.found("livelock")
        if self.stops.get((point, rank)) == self.visits[point, rank]:
            self.stopped.add(rank)
        at, error = self.faults.get((point, rank), (0, None))
        if error is not None and at == self.visits[point, rank]:
            raise error

    def _happens(self, what: str, rank: int) -> None:
        if what == "arrive":
            self.script.arrivals.append([self.late[rank]])
        else:
            {"stop": self.stopped, "die": self.killed, "error": self.broken_while_idle}[what].add(rank)

    def stop_requested(self, rank: int) -> bool:
        """Asked at every turn of a poll, so it is also where a rank that sleeps dies or breaks."""
        if rank in self.killed:
            raise DiedError
        if rank in self.broken_while_idle:
            self.broken_while_idle.discard(rank)
            raise RuntimeError("broke while idle")
        return rank in self.stopped

    def found(self, what: str) -> BrokenError:
        with self.hub.change():
            self.hub.broken = BrokenError(what)
        return BrokenError(what)

    def check_batch(self, batch: Batch, rank: int) -> None:
        step = self.controls[rank].num_records
        if any(self.abort_step.get(request_id, step + 1) <= step for request_id in batch.request_ids.tolist()):
            raise self.found("aborted sequence still scheduled")

    def tokens(self, batch: Batch) -> Int64Array:
        ids = []
        for seq, position in zip(batch.logit_seqs, batch.draw_positions, strict=True):
            request_id = int(batch.request_ids[seq])
            ids.append(self.token(request_id, int(position)) if request_id >= 0 else 0)
        return np.array(ids, np.int64)

    def token(self, request_id: int, position: int) -> int:
        request = self.requests[request_id]
        nth = position - len(request.prompt_ids) + 1
        return EOS if nth == self.true_len.get(request_id, 10**9) else 100 + (request_id * 31 + position) % 800

    def expected(self, request_id: int) -> list[int]:
        """The tokens of a request that runs alone to its end."""
        request = self.requests[request_id]
        count = min(request.sampling.max_tokens, self.true_len.get(request_id, 10**9))
        return [self.token(request_id, len(request.prompt_ids) + i) for i in range(count)]

    # ---- running ----

    def rank_main(self, rank: int) -> None:
        mesh = Mesh.create(world=self.ranks, rank=rank, dp=self.dp)
        config = SchedulerConfig(
            max_model_len=64,
            max_num_seqs=4,
            max_num_tokens=8,
            block_size=4,
            num_kv_blocks=self.num_kv_blocks(rank),
            depth=self.depth,
        )
        control = self.controls[rank] = self.make_control(self.hub, rank)
        scheduler = self.make_scheduler(config, mesh.dp_rank)
        self.schedulers[rank] = scheduler
        engine = self.make_engine(
            mesh=mesh,
            control=control,
            scheduler=scheduler,
            runner=self.make_runner(self, rank, mesh),
            watch=Watch(),
            stop_requested=partial(self.stop_requested, rank),
            vote=control.vote,
            depth=self.depth,
            dispatcher=Dispatcher(self.script, mesh.dp, max_inflight=64) if rank == 0 else None,
        )
        try:
            code: int | None = engine.run()
        except DiedError:
            code = None
        except BaseException as error:
            code, self.errors[rank] = 1, error
        with self.hub.change():
            self.hub.live.discard(threading.get_ident())
            if code is None:
                self.hub.dead = True
            else:
                self.codes[rank] = code
                # an error that was not voted on fails fast: the record under the failure key
                self.hub.failed |= code == 1 and not isinstance(
                    self.errors.get(rank), (VotedError, PeerFailedError, HangError)
                )

    def run(self) -> "World":
        """Run to the end; raises HangError or BrokenError when the protocol is."""
        self.schedulers = [None] * self.ranks  # type: ignore[list-item]
        threads = [threading.Thread(target=self.rank_main, args=(rank,), daemon=True) for rank in range(self.ranks)]
        with self.hub.changed:  # no rank moves before all are known
            for thread in threads:
                thread.start()
                self.hub.live.add(thread.ident or 0)
        for thread in threads:
            thread.join(60)
            if thread.is_alive():
                raise HangError("a thread does not end")
        if self.hub.broken is not None:
            raise self.hub.broken
        for error in self.errors.values():
            if isinstance(error, HangError):
                raise error
        self.check_end()
        return self

    def check_end(self) -> None:
        """What must hold after every run."""
        if len(set(self.codes.values())) > 1:
            raise BrokenError(f"exit codes differ: {self.codes}")
        code = next(iter(self.codes.values()))
        if code == ExitCode.ERROR:
            if self.script.open and 0 in self.codes:
                raise BrokenError(f"requests forgotten: {self.script.open}")
            return
        if self.hub.outputs or any(self.hub.wakes.values()):
            raise BrokenError("message left behind")
        for rank, scheduler in enumerate(self.schedulers):
            if scheduler.num_free_blocks != self.num_kv_blocks(rank):
                raise BrokenError(
                    f"block leak on rank {rank}: {scheduler.num_free_blocks} free of {self.num_kv_blocks(rank)}"
                )
        for request_id, reason in self.script.reasons.items():
            if self.script.got[request_id] != self.expected(request_id):
                raise BrokenError(
                    f"request {request_id} ({reason}): {self.script.got[request_id]}, alone {self.expected(request_id)}"
                )
        if code != ExitCode.DRAINED and self.script.open:
            raise BrokenError(f"requests forgotten: {self.script.open}")


def make_request(request_id: int, prompt_len: int = 3, max_tokens: int = 4) -> Request:
    """A request whose prompt is its own."""
    prompt = tuple(10 + (request_id * 17 + i) % 80 for i in range(prompt_len))
    return Request(
        request_id=request_id,
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(EOS,)),
    )


def run_world(**options: Any) -> World:
    """Build and run a world."""
    return World(**options).run()
