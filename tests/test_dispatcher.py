"""Rank 0's desk: balance, room, aborts, the exit code."""

from dataclasses import dataclass, field

from dist_infer.dispatcher import Dispatcher, Incoming
from dist_infer.errors import ExitCode
from dist_infer.types import Admission, Request, SamplingParams, StepOutput


@dataclass
class Queue:
    """A frontend that hands over what the test has put into it."""

    incoming: list[Incoming] = field(default_factory=list)
    delivered: list[StepOutput] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    exit_code: ExitCode = ExitCode.DONE
    exhausted: bool = True
    failure: str = ""
    num_closed: int = 0
    broken: bool = False

    def poll(self, room: int) -> Incoming:
        self.rooms.append(room)
        return self.incoming.pop(0) if self.incoming else Incoming()

    def ready(self) -> bool:
        return bool(self.incoming)

    def deliver(self, output: StepOutput) -> None:
        self.delivered.append(output)

    def fail_open(self, message: str) -> None:
        if self.broken:
            raise OSError("no space left")
        self.failure = message

    def close(self) -> None:
        self.num_closed += 1


def request(request_id: int, prompt_len: int, max_tokens: int = 10) -> Request:
    return Request(request_id=request_id, prompt_ids=(1,) * prompt_len, sampling=SamplingParams(max_tokens=max_tokens))


def load(admissions: tuple[Admission, ...], num_groups: int) -> list[int]:
    tokens = [0] * num_groups
    for admission in admissions:
        tokens[admission.group] += len(admission.request.prompt_ids)
    return tokens


def test_groups_are_balanced_by_tokens_not_by_count() -> None:
    """4 long and 4 short requests that arrive in turns: round robin would put all long ones on two of four groups."""
    requests = [request(i, 2000 if i % 2 == 0 else 10) for i in range(8)]
    dispatcher = Dispatcher(Queue([Incoming(requests=requests)]), 4, max_inflight=100)
    admissions = dispatcher.news(drain=False).admissions
    assert [admission.request.request_id for admission in admissions] == list(range(8))  # in order of arrival
    assert load(admissions, 4) == [2010, 2010, 2010, 2010]


def test_finished_and_delivered_tokens_are_no_load() -> None:
    queue = Queue([Incoming(requests=[request(0, 100), request(1, 20)])])
    dispatcher = Dispatcher(queue, 2, max_inflight=100)
    assert [a.group for a in dispatcher.news(drain=False).admissions] == [0, 1]
    dispatcher.deliver([StepOutput(request_id=0, token_ids=(7,), finish_reason="stop")])
    queue.incoming.append(Incoming(requests=[request(2, 5), request(3, 5)]))
    assert [a.group for a in dispatcher.news(drain=False).admissions] == [0, 0]


def test_no_more_than_max_inflight_are_alive_and_none_while_draining() -> None:
    queue = Queue([Incoming(requests=[request(0, 1), request(1, 1)])])
    dispatcher = Dispatcher(queue, 1, max_inflight=3)
    dispatcher.news(drain=False)
    dispatcher.news(drain=False)
    dispatcher.deliver([StepOutput(request_id=0, token_ids=(7,), finish_reason="length")])
    dispatcher.news(drain=False)
    dispatcher.news(drain=True)
    assert queue.rooms == [3, 1, 2, 0]


def test_a_drain_gives_up_what_is_open_once_its_grace_is_over() -> None:
    queue = Queue([Incoming(requests=[request(0, 1), request(1, 1)])], exhausted=False)
    now = iter([10.0, 14.9, 15.0, 16.0])
    dispatcher = Dispatcher(queue, 1, max_inflight=3, grace_s=5.0, clock=lambda: next(now))
    dispatcher.news(drain=False)
    dispatcher.news(drain=True)
    dispatcher.deliver([StepOutput(request_id=0, token_ids=(7,), finish_reason="length")])
    assert [dispatcher.news(drain=True).aborts for _ in range(3)] == [(), (1,), ()]
    dispatcher.deliver([StepOutput(request_id=1, token_ids=(7,))])
    assert [output.request_id for output in queue.delivered] == [0]
    assert dispatcher.close(drained=True) == ExitCode.DRAINED


def test_without_a_limit_a_drain_gives_nothing_up() -> None:
    dispatcher = Dispatcher(Queue([Incoming(requests=[request(0, 1)])]), 1, max_inflight=3, clock=lambda: 1e9)
    dispatcher.news(drain=False)
    assert dispatcher.news(drain=True).aborts == dispatcher.news(drain=True).aborts == ()


def test_an_abort_travels_once_and_its_late_tokens_are_dropped() -> None:
    queue = Queue([Incoming(requests=[request(0, 1)], aborts=[0]), Incoming(aborts=[0, 99])])
    dispatcher = Dispatcher(queue, 1, max_inflight=3)
    news = dispatcher.news(drain=False)
    assert len(news.admissions) == 1
    assert news.aborts == (0,)
    assert dispatcher.news(drain=False).aborts == ()  # ended already, never known
    dispatcher.deliver([StepOutput(request_id=0, token_ids=(7,))])
    assert queue.delivered == []


def test_the_end_of_input_is_told_once() -> None:
    dispatcher = Dispatcher(Queue([Incoming(end_of_input=True)]), 1, max_inflight=3)
    assert dispatcher.ready()
    assert dispatcher.news(drain=False).end_of_input
    assert not dispatcher.ready()
    assert not dispatcher.news(drain=False).end_of_input


def test_exit_code() -> None:
    assert Dispatcher(Queue(), 1, 1).close(drained=False) == ExitCode.DONE
    assert Dispatcher(Queue(), 1, 1).close(drained=True) == ExitCode.DONE  # the stop came when all was done
    assert Dispatcher(Queue(exhausted=False), 1, 1).close(drained=True) == ExitCode.DRAINED
    failed = Queue(exit_code=ExitCode.FAILED_REQUESTS)
    assert Dispatcher(failed, 1, 1).close(drained=False) == ExitCode.FAILED_REQUESTS
    failed.exhausted = False
    assert Dispatcher(failed, 1, 1).close(drained=True) == ExitCode.DRAINED


def test_a_failure_answers_what_is_open_and_closes_the_output() -> None:
    queue = Queue()
    Dispatcher(queue, 1, 1).fail_open("rank 1 died")
    assert queue.failure == "rank 1 died"
    assert queue.num_closed == 1
    broken = Queue(broken=True)
    Dispatcher(broken, 1, 1).fail_open("rank 1 died")  # a full disk doesn't hide the cause
    assert broken.num_closed == 1  # and its lock is given back


def test_times_are_taken_on_the_way() -> None:
    queue = Queue([Incoming(requests=[request(0, 5), request(1, 2)]), Incoming(aborts=[1])])
    dispatcher = Dispatcher(queue, 1, max_inflight=3)
    dispatcher.news(drain=False)
    dispatcher.deliver([StepOutput(request_id=0, token_ids=(7, 8), finish_reason="stop")])
    dispatcher.news(drain=False)
    dispatcher.deliver([StepOutput(request_id=1, token_ids=(7,))])
    meter = dispatcher.meter
    assert (meter.prompt_tokens, meter.output_tokens, meter.first_from_admission.count) == (7, 2, 1)
