"""Each rule of docs/protocol.md by the naive variant that breaks it: the world must notice every one of them.

The names are those of the model (docs/model/step.pml). A variant is a subclass here, never a switch in the product.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dist_infer.comm import agreement
from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.engine import Engine
from dist_infer.errors import ExitCode
from dist_infer.scheduler import Scheduler
from dist_infer.sequences import Sequence
from dist_infer.types import Batch, Int64Array, News, StepOutput
from tests.memory_control import BrokenError, HangError, MemoryControl
from tests.protocol_world import FakeRunner, Tokens, World, make_request

ONE = [[make_request(0)]]
TWO = [[make_request(0), make_request(1)]]
PLANTED = RuntimeError("planted")


def catches(what: type[BaseException] | str, **options: Any) -> None:
    """The world passes as the product builds it, and fails with the variant in `options`."""
    variants = ("make_engine", "make_runner", "make_control", "make_scheduler")
    sound = {name: value for name, value in options.items() if name not in variants}
    World(**sound).run()
    if isinstance(what, str):
        with pytest.raises(BrokenError, match=what):
            World(**options).run()
    else:
        with pytest.raises(what):
            World(**options).run()


@pytest.mark.parametrize("depth", [0, 1])
def test_patch_own(depth: int) -> None:
    """Rule 5: the stand-in of an idle group stands in every rank's entry, from the table."""

    class Runner(FakeRunner):
        def sizes(self, batch: Batch, decision: Decision) -> object:
            tokens = list(decision.rank_tokens)
            tokens[self.rank] = max(tokens[self.rank], 1)
            return ("eager", tuple(tokens))

    catches("mismatched collective", ranks=2, dp=2, depth=depth, arrivals=ONE, make_runner=Runner)


@pytest.mark.parametrize("depth", [0, 1])
def test_graph_local(depth: int) -> None:
    """Rule 5: graph or eager, and the bucket, from the table."""

    class Runner(FakeRunner):
        def sizes(self, batch: Batch, decision: Decision) -> object:
            bucket = self.graph_bucket(batch)
            return ("graph", bucket) if bucket != EAGER else super().sizes(batch, decision)

    three = [[make_request(0), make_request(1), make_request(2)]]
    catches("mismatched collective", ranks=2, dp=2, depth=depth, arrivals=three, make_runner=Runner)


@pytest.mark.parametrize("depth", [0, 1])
def test_idle_returns(depth: int) -> None:
    """Rule 6: a group without tokens runs a dummy."""

    class Naive(Engine):
        def _launch(self, decision: Decision, batch: Batch | None, inputs: Any) -> None:
            if batch is not None:
                super()._launch(decision, batch, inputs)

    catches(HangError, ranks=2, dp=2, depth=depth, arrivals=ONE, make_engine=Naive)


@pytest.mark.parametrize("depth", [0, 1])
def test_raise_no_vote(depth: int) -> None:
    """Rule 16: a rank with an error stays for the vote; one that just leaves sits in Finalize, still beating."""

    class Naive(Engine):
        @contextmanager
        def _votable(self) -> Iterator[None]:
            try:
                yield
            except RuntimeError:
                self._control.wait(lambda: False, idle=True)

    faults = {("collect", 1): (1, PLANTED)}
    catches(HangError, ranks=2, depth=depth, arrivals=ONE, faults=faults, make_engine=Naive)


@pytest.mark.parametrize("depth", [0, 1])
def test_root_silent(depth: int) -> None:
    """Rule 1: rank 0 broadcasts news also when it holds an error."""

    class Control(MemoryControl):
        def broadcast_news(self, data: bytes) -> None:
            if self.num_records != 1:
                super().broadcast_news(data)

    faults = {("news", 0): (2, PLANTED)}
    catches(HangError, ranks=2, depth=depth, arrivals=ONE, faults=faults, make_control=Control)


def test_vote_only() -> None:
    """Rule 17: an error after the record can't wait for the next vote, peers are in a collective already."""

    class Naive(Engine):
        def _launch(self, decision: Decision, batch: Batch | None, inputs: Any) -> None:
            with self._votable():
                super()._launch(decision, batch, inputs)

    catches(HangError, ranks=2, arrivals=ONE, faults={("launch", 1): (1, PLANTED)}, make_engine=Naive)


class LateAborts(Scheduler):
    """Applies the aborts of a news one step later."""

    late: tuple[int, ...] = ()

    def apply(self, news: News, *, drain: bool) -> None:
        now = News(admissions=news.admissions, aborts=self.late, end_of_input=news.end_of_input)
        self.late = news.aborts
        super().apply(now, drain=drain)


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_async(depth: int) -> None:
    """Rule 1: aborts travel in the news; seen at different steps, the ranks of a group hold different schedules."""
    made: list[Scheduler] = []

    def make_scheduler(*args: Any) -> Scheduler:
        made.append(Scheduler(*args) if made else LateAborts(*args))
        return made[-1]

    class Runner(FakeRunner):
        def prepare(self, batch: Batch) -> Batch:
            return batch  # the table must find it, not the check of the batch

    options: dict[str, Any] = {
        "ranks": 2,
        "depth": depth,
        "arrivals": TWO,
        "aborts_after": {0: 1},
        "make_runner": Runner,
    }
    World(**options).run()
    world = World(**options, make_scheduler=make_scheduler).run()
    assert set(world.codes.values()) == {ExitCode.ERROR}
    assert all("ranks disagree" in str(error) for error in world.errors.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_abort_late(depth: int) -> None:
    """Rule 10: an abort keeps its sequence out of the very step of its news."""
    catches("aborted sequence", ranks=2, depth=depth, arrivals=TWO, aborts_after={0: 1}, make_scheduler=LateAborts)


def test_eos_at_once() -> None:
    """Rule 10: at depth 1 the token after the end is dropped; rank 0 takes none even from a scheduler that gives it."""

    class Naive(Scheduler):
        def commit(self, batch: Batch, token_ids: Int64Array, scores: Any = None) -> list[StepOutput]:
            outputs = super().commit(batch, token_ids, scores)
            told = {output.request_id for output in outputs}
            for seq, token_id in zip(batch.logit_seqs.tolist(), token_ids.tolist(), strict=True):
                request_id = int(batch.request_ids[seq])
                if request_id not in told:
                    late.append(request_id)
                    outputs.append(StepOutput(request_id=request_id, token_ids=(token_id,)))
            return outputs

    late: list[int] = []
    world = World(ranks=2, depth=1, arrivals=TWO, true_len={0: 2}, make_scheduler=Naive).run()
    assert 0 in late
    assert world.script.got[0] == world.expected(0)


def test_leak_abort() -> None:
    """Rule 10: the blocks of a sequence that is aborted in flight come back when that step is collected."""

    forgotten: set[int] = set()

    class Naive(Scheduler):
        def _abort(self, request_id: int) -> None:
            seq = self._running.get(request_id)
            if seq is not None and seq.num_in_flight:
                forgotten.add(request_id)
            super()._abort(request_id)

        def _leave(self, seq: Sequence) -> None:
            if seq.request.request_id not in forgotten:
                super()._leave(seq)

    catches("block leak", ranks=2, depth=1, arrivals=TWO, aborts_after={0: 1}, make_scheduler=Naive)


@pytest.mark.parametrize("depth", [0, 1])
def test_idle_local(depth: int) -> None:
    """Rule 11: a worker whose own group has no work goes on as long as the pool does."""

    class Naive(Engine):
        def _receive_news(self) -> News:
            news = super()._receive_news()
            while self._scheduler.live == 0 and news == News():
                news = super()._receive_news()
            return news

    catches(HangError, ranks=2, dp=2, depth=depth, arrivals=ONE, make_engine=Naive)


@pytest.mark.parametrize("depth", [0, 1])
def test_idle_root(depth: int) -> None:
    """Rule 11: so does rank 0."""

    class Naive(Engine):
        def _news(self) -> News:
            if self._dispatcher is not None and self._scheduler.live == 0:
                self._control.wait(self._root_wakes, idle=True)
            return super()._news()

    options: dict[str, Any] = {"ranks": 2, "dp": 2, "depth": depth, "ends": False, "when_idle": [("stop", 1)]}
    short, long = make_request(0, 1, 1), make_request(1, 8, 8)
    World(**options, arrivals=[[long, short]]).run()
    world = World(**options, arrivals=[[long], [short]], make_engine=Naive)
    world.hub.when_idle.clear()
    with pytest.raises(HangError):
        world.run()


def naive_quiet(quiet: Callable[[Decision, Any], bool]) -> Callable[..., Decision]:
    """`decide` with another idea of a quiet pool."""
    decide = agreement.decide

    def naive(table: Any, **state: Any) -> Decision:
        d = decide(table, **state)
        is_quiet = quiet(d, table)
        return Decision(
            **{name: getattr(d, name) for name in Decision.__dataclass_fields__ if name not in ("quiet", "over")},
            quiet=is_quiet,
            over=is_quiet and (state["end_of_input"] or d.drain),
        )

    return naive


LIVE = agreement.FIELDS.index("live")


def test_idle_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 11: no tokens is not quiet, a request may wait for blocks that a sequence in flight still holds."""
    options: dict[str, Any] = {
        "ranks": 2,
        "depth": 1,
        "arrivals": [[make_request(0, 5, 3), make_request(1, 5, 3)]],
        "true_len": {0: 2, 1: 2},
        "num_kv_blocks": lambda _: 2,
    }
    World(**options).run()
    monkeypatch.setattr(agreement, "decide", naive_quiet(lambda d, table: not d.launched))
    with pytest.raises(BrokenError, match=r"forgotten|block leak"):
        World(**options).run()


def test_idle_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 11: nor is an empty table with a step still to collect."""

    class SlowTokens(Tokens):
        def numpy(self) -> Int64Array:
            time.sleep(0.01 * self.runner.rank)  # rank 0 is through before the other group's outputs are sent
            return super().numpy()

    class Runner(FakeRunner):
        def launch(self, batch: Batch, decision: Decision) -> Tokens:
            tokens = super().launch(batch, decision)
            return SlowTokens(tokens.runner, tokens.count, tokens.ids)

    options: dict[str, Any] = {
        "ranks": 2,
        "dp": 2,
        "depth": 1,
        "make_runner": Runner,
        "arrivals": [[make_request(0, 8, 8), make_request(1, 2, 8)]],
        "true_len": {0: 2, 1: 4},
    }
    World(**options).run()
    monkeypatch.setattr(agreement, "decide", naive_quiet(lambda d, table: not d.launched and not table[:, LIVE].any()))
    with pytest.raises(BrokenError, match=r"message left behind|block leak"):
        World(**options).run()


@pytest.mark.parametrize("depth", [0, 1])
def test_idle_timeout(depth: int) -> None:
    """Rule 1: a sleeping worker never goes to the agreement without news."""

    class Control(MemoryControl):
        def receive_news(self, on_poll: Callable[[], None], *, idle: bool) -> bytes:
            if idle and self.num_news > 0 and len(self.hub.news) == self.num_news:
                return b"{}"
            return super().receive_news(on_poll, idle=idle)

    options: dict[str, Any] = {
        "ranks": 2,
        "depth": depth,
        "arrivals": ONE,
        "ends": False,
        "late": [make_request(1)],
        "when_idle": [("arrive", 0), ("stop", 0)],
    }
    assert set(World(**options).run().codes.values()) == {ExitCode.DONE}
    world = World(**options, make_control=Control).run()
    assert all("ranks disagree" in str(error) for error in world.errors.values())
    assert set(world.codes.values()) == {ExitCode.ERROR}


@pytest.mark.parametrize("depth", [0, 1])
def test_exit_root(depth: int) -> None:
    """Rule 14: nobody leaves by its own knowledge, not even rank 0 that has answered everything."""

    class Naive(Engine):
        def step(self) -> bool:
            over = super().step()
            return over if self._dispatcher is None else self._end_of_input and self._dispatcher.frontend.exhausted

    catches(HangError, ranks=2, depth=depth, arrivals=ONE, make_engine=Naive)


@pytest.mark.parametrize("depth", [0, 1])
def test_news_polled(depth: int) -> None:
    """Rule 1: exactly one news a step, also an empty one; nobody goes on without it."""

    class Control(MemoryControl):
        def broadcast_news(self, data: bytes) -> None:
            if data != b"{}":
                time.sleep(0.02)  # the workers look before it is there
                super().broadcast_news(data)

        def receive_news(self, on_poll: Callable[[], None], *, idle: bool) -> bytes:
            if len(self.hub.news) == self.num_news and not idle:
                return b"{}"
            return super().receive_news(on_poll, idle=idle)

    options: dict[str, Any] = {"ranks": 3, "depth": depth, "arrivals": [ONE[0], [], [make_request(1)]]}
    World(**options).run()
    world = World(**options, make_control=Control)
    try:
        world.run()
    except (HangError, BrokenError):
        return
    assert any("ranks disagree" in str(error) for error in world.errors.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_no_wake(depth: int) -> None:
    """Rule 13: a signal that finds a worker asleep wakes the pool."""

    class Naive(Engine):
        def _wake_root_if_needed(self) -> None:
            self._stop_requested()

    catches(HangError, ranks=2, depth=depth, arrivals=ONE, ends=False, when_idle=[("stop", 1)], make_engine=Naive)


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_local(depth: int) -> None:
    """Rule 10: a stop acts through the table, on all ranks at one step."""

    class Naive(Engine):
        def _plan(self, news: News) -> Batch | None:
            with self._votable():
                self._scheduler.apply(News(), drain=self._stop_requested())
            return super()._plan(news)

    options: dict[str, Any] = {
        "ranks": 3,
        "depth": depth,
        "arrivals": [[make_request(i, 8, 6)] for i in range(8)],
        "stops": {("prepare", 1): 6},
    }
    World(**options).run()
    world = World(**options, make_engine=Naive).run()
    assert any("ranks disagree" in str(error) for error in world.errors.values())


def test_gather_at_collect() -> None:
    """Rule 7: no collective in collect, a rank with an error would be missed in it."""

    class Gathered(Tokens):
        def numpy(self) -> Any:
            ids = super().numpy()
            count = self.runner.hub.post(self.runner.rank, "gather")
            self.runner.hub.wait(lambda: self.runner.hub.all_posted(count), what="gather at collect")
            return ids

    class Runner(FakeRunner):
        def launch(self, batch: Batch, decision: Decision) -> Tokens:
            tokens = super().launch(batch, decision)
            return Gathered(tokens.runner, tokens.count, tokens.ids)

    catches(
        HangError,
        ranks=2,
        depth=1,
        arrivals=ONE,
        faults={("collect", 1): (2, PLANTED)},
        make_runner=Runner,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_out_blocks(depth: int) -> None:
    """Rule 8: rank 0 does not wait for the outputs of a step that it has just collected."""

    class Naive(Engine):
        def _deliver(self, decision: Decision) -> None:
            if self._dispatcher is not None:
                due = decision.step - self._depth
                self._control.wait(lambda: self._take_outputs() and self._owed_until(due), idle=False)

    catches(
        HangError,
        ranks=2,
        dp=2,
        depth=depth,
        arrivals=TWO,
        faults={("collect", 1): (2, PLANTED)},
        make_engine=Naive,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_kv_local(depth: int) -> None:
    """Rule 2: the ranks of a group hold one number of KV blocks."""
    options: dict[str, Any] = {"ranks": 2, "depth": depth, "arrivals": [[make_request(i, 6, 6) for i in range(4)]]}
    World(**options, num_kv_blocks=lambda _: 4).run()
    world = World(**options, num_kv_blocks=lambda rank: 4 + 2 * rank).run()
    assert any("ranks disagree" in str(error) for error in world.errors.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_no_farewell(depth: int) -> None:
    """Rule 15: the worst exit code is everybody's."""

    class Control(MemoryControl):
        def farewell(self, code: int) -> list[int]:
            return [code]

    catches(
        "exit codes differ",
        ranks=2,
        depth=depth,
        arrivals=[[make_request(i, 8, 6)] for i in range(8)],
        stops={("prepare", 1): 3},
        make_control=Control,
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_idle_no_beat(depth: int) -> None:
    """Rule 12: liveness is watched while the pool sleeps."""

    class Control(MemoryControl):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.idle_checks_beats = False

    catches(HangError, ranks=2, depth=depth, arrivals=ONE, ends=False, when_idle=[("die", 1)], make_control=Control)
