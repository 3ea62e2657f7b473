"""One rank's steps without engine and peers: schedule, prepare, launch, commit, a step in flight."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dist_infer.comm.agreement import Decision
from dist_infer.config import SchedulerConfig
from dist_infer.scheduler import Scheduler
from dist_infer.step_runner import SampledIds, StepRunner
from dist_infer.types import Admission, Batch, BatchKind, News, Request


@dataclass
class StepLoop:
    """Serves requests on one rank; the answers stand in `tokens`."""

    step_runner: StepRunner
    config: SchedulerConfig
    wait: Callable[[SampledIds], None] = lambda tokens: None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    kinds: list[BatchKind] = field(default_factory=list)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, 0)
        self._in_flight: deque[tuple[Batch, SampledIds]] = deque()

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
        """One step, as the engine orders it."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self.num_steps += 1
            self.kinds.append(batch.kind)
            prepared = self.step_runner.prepare(batch)
            decision = alone(batch, self.step_runner.graph_bucket(batch))
            self._in_flight.append((batch, self.step_runner.launch(prepared, decision)))
        while len(self._in_flight) > (self.config.depth if batch is not None else 0):
            done, sampled = self._in_flight.popleft()
            self.wait(sampled)
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
