"""One rank's steps without the engine: schedule, prepare, launch, commit, a step in flight."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dist_infer.comm.agreement import NO_TOKENS, Decision, Record, decide
from dist_infer.comm.mesh import Mesh
from dist_infer.config import SchedulerConfig
from dist_infer.scheduler import Scheduler, batch_digest
from dist_infer.step_runner import PreparedStep, SampledIds, StepRunner
from dist_infer.types import Admission, Batch, BatchKind, News, Request


@dataclass
class StepLoop:
    """Serves requests on one rank; the answers stand in `tokens`."""

    step_runner: StepRunner
    config: SchedulerConfig
    wait: Callable[[SampledIds], None] = lambda tokens: None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    kinds: list[BatchKind] = field(default_factory=list)
    launched: list[tuple[BatchKind, int, int]] = field(default_factory=list)  # kind, sequences, rows of the graph
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, 0)
        self._in_flight: deque[tuple[Batch | None, SampledIds]] = deque()

    def serve(self, requests: Iterable[Request]) -> dict[int, list[int]]:
        """The tokens of each request, by its id, once all are answered."""
        self.admit(requests)
        while self.scheduler.live or self._in_flight:
            self.step()
        return self.tokens

    def admit(self, requests: Iterable[Request]) -> None:
        """Requests that arrive before the next step."""
        asked = tuple(Admission(group=0, request=request) for request in requests)
        self.tokens.update({admission.request.request_id: [] for admission in asked})
        self.scheduler.apply(News(admissions=asked), drain=False)

    def step(self) -> None:
        """One step of a world of one, as the engine orders it; nothing where there is nothing to do."""
        batch = self.scheduler.schedule()
        if batch is not None:
            prepared = self.step_runner.prepare(batch)
            self._launch(batch, prepared, alone(batch, self.step_runner.graph_bucket(batch)))
        self._collect(self.config.depth if batch is not None else 0)

    def step_with(self, mesh: Mesh, gather: Callable[[Tensor], Tensor]) -> Decision:
        """One step together with the other ranks: what the table that `gather` makes of their records decides.

        Ranks: collective over the world.
        """
        batch = self.scheduler.schedule()
        prepared = None if batch is None else self.step_runner.prepare(batch)
        table = gather(torch.from_numpy(self._record(batch).encode())[None]).numpy()
        decision = decide(table, mesh=mesh, depth=1, was_launched=True, drain=False, end_of_input=False)
        assert not decision.leave_now, decision.fault
        if decision.launched:
            self._launch(batch, prepared or self.step_runner.prepare(Batch.dummy()), decision)
        self._collect(self.config.depth if decision.launched else 0)
        return decision

    def _record(self, batch: Batch | None) -> Record:
        return Record(
            step=0,
            kind=batch.kind if batch else BatchKind.NONE,
            tokens=batch.num_tokens if batch else 0,
            sequences=batch.num_seqs if batch else 0,
            live=self.scheduler.live,
            graph_bucket=self.step_runner.graph_bucket(batch) if batch else NO_TOKENS,
            error=False,
            stop=False,
            woke=False,
            schedule_digest=batch_digest(batch) if batch else 0,
            decision_digest=0,
        )

    def _launch(self, batch: Batch | None, prepared: PreparedStep, decision: Decision) -> None:
        self.num_steps += 1
        self.kinds.append(decision.kind)
        self.launched.append((decision.kind, batch.num_seqs if batch is not None else 0, decision.graph_bucket))
        self._in_flight.append((batch, self.step_runner.launch(prepared, decision)))

    def _collect(self, depth: int) -> None:
        while len(self._in_flight) > depth:
            done, sampled = self._in_flight.popleft()
            self.wait(sampled)
            if done is None:
                continue
            for output in self.scheduler.commit(done, sampled.numpy(), sampled.scores()):
                self.tokens[output.request_id].extend(output.token_ids)


def alone(batch: Batch, graph_bucket: int) -> Decision:
    """What the table of one rank decides."""
    return Decision(
        step=1,
        failed_ranks=(),
        fault=None,
        drain=False,
        launched=True,
        quiet=False,
        over=False,
        kind=batch.kind,
        rank_tokens=(batch.num_tokens,),
        graph_bucket=graph_bucket,
        woke=(),
    )
