"""The step loop that every rank runs. Rule numbers are those of docs/protocol.md.

`launch(n)` and `collect(n - depth)` are apart from each other: with depth 0 (CPU) a step is collected at once, with
depth 1 (GPU) while the next one is prepared. An error before the record is kept and voted on (rule 16); one after it
leaves `run` at once (rule 17).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dist_infer.comm.agreement import NO_TOKENS, Agreement, ControlPlane, Decision, Record, groups_with_tokens
from dist_infer.comm.mesh import Mesh
from dist_infer.dispatcher import Dispatcher
from dist_infer.errors import DistInferError, ExitCode, PeerFailedError, worst_exit_code
from dist_infer.scheduler import Scheduler, batch_digest
from dist_infer.types import Batch, BatchKind, Float64Array, Int64Array, News, decode_outputs, encode_outputs


class SampledTokens(Protocol):
    """Token ids on their way from the device to the host."""

    def ready(self) -> bool:
        """The copy has arrived; never waits."""

    def numpy(self) -> Int64Array:
        """Shapes: [L] of the batch."""

    def scores(self) -> Float64Array | None:
        """What the batch's `scores` ask for, None if nothing. Shapes: [Q + P, 2 + 2 K]."""


class StepRunner(Protocol):
    """The model of this rank. All collectives of a step are inside `launch`."""

    def graph_bucket(self, batch: Batch) -> int:
        """Rows of the graph that could run this batch; EAGER where none can."""

    def prepare(self, batch: Batch) -> Any:
        """Inputs on the device; no collective."""

    def launch(self, inputs: Any, decision: Decision) -> SampledTokens:
        """Forward and sampling: equal collectives on all ranks."""


class Watch(Protocol):
    """The deadlines of this rank (design: liveness and progress)."""

    def step(self, step: int) -> None:
        """A step begins: the progress deadline starts anew."""

    def sleeping(self) -> AbstractContextManager[None]:
        """The pool sleeps: no progress is due."""


@dataclass(slots=True)
class _InFlight:
    step: int
    batch: Batch | None  # None: a dummy, its token is nobody's
    tokens: SampledTokens


class Engine:
    """One rank's loop over steps.

    `vote(stage, error)` is called by all ranks when the table shows an error and raises the same error on each.
    `on_end` is called by all ranks before the farewell of a job that did not fail, so it may be collective.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        control: ControlPlane,
        scheduler: Scheduler,
        runner: StepRunner,
        watch: Watch,
        stop_requested: Callable[[], bool],
        vote: Callable[[str, BaseException | None], object],
        depth: int,
        dispatcher: Dispatcher | None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        if (dispatcher is not None) != (mesh.rank == 0):
            raise ValueError("rank 0, and no other rank, has the dispatcher")
        self._mesh = mesh
        self._control = control
        self._scheduler = scheduler
        self._runner = runner
        self._watch = watch
        self._stop_requested = stop_requested
        self._vote = vote
        self._depth = depth
        self._dispatcher = dispatcher
        self._on_end = on_end
        self._agreement = Agreement(mesh, control, depth)
        self._step = 0
        self._error: Exception | None = None
        self._woke = False
        self._end_of_input = False
        self._in_flight: deque[_InFlight] = deque()
        # Rank 0: (step, source rank) whose outputs have not been delivered.
        self._owed: deque[tuple[int, int]] = deque()

    def run(self) -> ExitCode:
        """Steps until all ranks leave together; the exit code is everybody's.

        Ranks: collective over the world.
        Errors: the voted one, equal on all ranks; PeerFailedError; anything raised after the record, on this rank only.
        """
        try:
            while not self.step():
                pass
            return self._farewell()
        except BaseException as error:
            if self._dispatcher is not None:
                self._dispatcher.fail_open(_one_line(error))
            raise

    def step(self) -> bool:
        """One step; true when it was the last one."""
        self._step += 1
        batch = self._plan(self._news())
        self._post(batch)
        inputs = self._runner.prepare(batch) if batch is not None else None
        decision = self._decide()
        self._launch(decision, batch, inputs)
        self._collect(decision)
        self._deliver(decision)
        return decision.over

    # Rules 1 and 11 to 13: news, sleep, wake-up.

    def _news(self) -> News:
        self._watch.step(self._step)
        if self._dispatcher is None:
            return self._receive_news()
        news = News()
        with self._votable():
            if self._agreement.last.quiet:
                with self._watch.sleeping():
                    self._control.wait(self._root_wakes, idle=True)
            news = self._dispatcher.news(drain=self._agreement.last.drain)
            self._end_of_input = self._end_of_input or news.end_of_input
        if self._error is not None:
            news = News()  # an empty news leads everybody to the vote
        self._control.broadcast_news(news.encode())
        return news

    def _receive_news(self) -> News:
        if self._agreement.last.quiet:
            with self._watch.sleeping():
                data = self._control.receive_news(self._wake_root_if_needed, idle=True)
        else:
            data = self._control.receive_news(_nothing, idle=False)
        news = News()
        with self._votable():
            news = News.decode(data)
            self._end_of_input = self._end_of_input or news.end_of_input
        return news

    def _root_wakes(self) -> bool:
        dispatcher = self._dispatcher
        return (
            self._error is not None
            or self._stop_requested()
            or self._control.woken()
            or (dispatcher is not None and dispatcher.ready())
        )

    def _wake_root_if_needed(self) -> None:
        stop = False
        with self._votable():
            stop = self._stop_requested()
        if not self._woke and (stop or self._error is not None):
            self._woke = True
            self._control.wake_root()

    # Rules 2 and 3: schedule, record.

    def _plan(self, news: News) -> Batch | None:
        batch = None
        with self._votable():
            self._scheduler.apply(news, drain=self._agreement.last.drain)
            batch = self._scheduler.schedule()
        return batch if self._error is None else None

    def _post(self, batch: Batch | None) -> None:
        self._agreement.post(
            Record(
                step=self._step,
                kind=batch.kind if batch else BatchKind.NONE,
                tokens=batch.num_tokens if batch else 0,
                sequences=batch.num_seqs if batch else 0,
                live=self._scheduler.live,
                graph_bucket=self._runner.graph_bucket(batch) if batch else NO_TOKENS,
                error=self._error is not None,
                stop=self._stop_requested(),
                woke=self._woke,
                schedule_digest=batch_digest(batch) if batch else 0,
                decision_digest=self._agreement.last.digest(),
            )
        )
        self._woke = False

    # Rules 5 and 16: the table decides.

    def _decide(self) -> Decision:
        decision = self._agreement.wait(end_of_input=self._end_of_input)
        if decision.leave_now:
            fault = (
                DistInferError(f"ranks disagree in step {decision.step}: {decision.fault}") if decision.fault else None
            )
            self._vote(f"step {decision.step}", self._error or fault)
            raise DistInferError(f"ranks {decision.failed_ranks} voted an error in step {decision.step} but gave none")
        if self._dispatcher is not None:
            for rank in decision.woke:
                self._control.take_wake(rank)
            roots = [self._mesh.root_of(group) for group in groups_with_tokens(decision, self._mesh)]
            self._owed.extend((decision.step, root) for root in roots if root != 0)
        return decision

    # Rules 6 and 7: launch and collect.

    def _launch(self, decision: Decision, batch: Batch | None, inputs: Any) -> None:
        if not decision.launched:
            return
        if batch is None:  # a group without tokens runs one that is nobody's, in lockstep
            inputs = self._runner.prepare(Batch.dummy())
        self._in_flight.append(_InFlight(decision.step, batch, self._runner.launch(inputs, decision)))

    def _collect(self, decision: Decision) -> None:
        while self._in_flight and self._in_flight[0].step <= decision.step - self._depth:
            done = self._in_flight.popleft()
            self._control.wait(done.tokens.ready, idle=False)
            if done.batch is None or self._error is not None:
                continue
            with self._votable():
                outputs = self._scheduler.commit(done.batch, done.tokens.numpy(), done.tokens.scores())
                if self._dispatcher is not None:
                    self._dispatcher.deliver(outputs)
                elif self._mesh.tp_rank == 0:
                    self._control.send_outputs(done.step, encode_outputs(outputs))

    # Rule 8: rank 0 takes what has come, and waits only for what this table proves to be sent.

    def _deliver(self, decision: Decision) -> None:
        if self._dispatcher is None:
            return
        last_due = decision.step - 1 - self._depth
        self._take_outputs()
        if self._owed and self._owed[0][0] <= last_due:
            self._control.wait(lambda: self._take_outputs() and self._owed_until(last_due), idle=False)

    def _take_outputs(self) -> bool:
        for source, step, data in self._control.take_outputs():
            self._owed.remove((step, source))
            if self._error is None and self._dispatcher is not None:
                with self._votable():
                    self._dispatcher.deliver(decode_outputs(data))
        return True

    def _owed_until(self, step: int) -> bool:
        return not self._owed or self._owed[0][0] > step

    # Rule 15: the farewell.

    def _farewell(self) -> ExitCode:
        code = ExitCode.DONE
        with self._votable():
            if self._dispatcher is not None:
                code = self._dispatcher.close(drained=self._agreement.last.drain)
        with self._votable():
            self._on_end()
        if self._error is not None:
            code = ExitCode.ERROR
        worst = worst_exit_code(self._control.farewell(code))
        if self._error is not None:
            raise self._error
        return worst

    @contextmanager
    def _votable(self) -> Iterator[None]:
        """Keep an error of this rank for its next record; a failed peer is not votable."""
        try:
            yield
        except PeerFailedError:
            raise
        except Exception as error:  # whatever it is, peers must learn of it through the record
            if self._error is None:
                self._error = error


def _nothing() -> None:
    return None


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
