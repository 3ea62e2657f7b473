"""The frontend of a benchmark, by a clock that the test moves."""

import itertools

import pytest

from dist_infer.dispatcher import Dispatcher
from dist_infer.errors import ExitCode
from dist_infer.intake.bench_job import BenchJob, poisson_arrivals
from dist_infer.metrics import ServingMeter
from dist_infer.types import Request, StepOutput


class Bench:
    """A job whose requests are answered by hand."""

    def __init__(self, num_warmup: int, num_requests: int, arrivals_s: list[float] | None = None) -> None:
        requests = [Request(request_id=idx, prompt_ids=(1, 2)) for idx in range(num_warmup + num_requests)]
        self.now_s = 100.0
        self.warm_at_s: list[float] = []
        self.meter = ServingMeter(lambda: self.now_s)
        self.job = BenchJob(
            requests[num_warmup:],
            warmup=requests[:num_warmup],
            arrivals_s=arrivals_s,
            meter=self.meter,
            clock=lambda: self.now_s,
            on_warm=lambda: self.warm_at_s.append(self.now_s),
        )
        self.desk = Dispatcher(self.job, 1, 3, meter=self.meter)

    def admit(self) -> list[int]:
        news = self.desk.news(drain=False)
        return [admission.request.request_id for admission in news.admissions]

    def finish(self, *ids: int) -> None:
        self.desk.deliver([StepOutput(request_id=idx, token_ids=(7,), finish_reason="length") for idx in ids])


def test_the_measured_part_begins_when_the_warm_up_has_ended() -> None:
    bench = Bench(2, 2)
    assert bench.desk.ready()
    assert bench.admit() == [0, 1]
    assert not bench.desk.ready()
    bench.now_s = 101.0
    bench.finish(0)
    assert bench.admit() == []
    assert bench.warm_at_s == []
    bench.now_s = 105.0
    bench.finish(1)
    assert bench.desk.ready()
    assert bench.admit() == [2, 3]
    assert bench.warm_at_s == [105.0]
    bench.now_s = 106.0
    bench.finish(2, 3)
    assert (bench.meter.prompt_tokens, bench.meter.output_tokens) == (4, 2)
    assert bench.meter.first_from_submission.max_s == 1.0
    assert bench.job.exhausted and bench.job.num_done == 2
    assert bench.desk.close(drained=True) is ExitCode.DONE


def test_without_a_warm_up_all_come_at_once_as_far_as_there_is_room() -> None:
    bench = Bench(0, 5)
    assert bench.admit() == [0, 1, 2]
    bench.now_s = 102.0
    bench.finish(1)
    assert bench.admit() == [3]
    bench.finish(0, 2)
    news = bench.desk.news(drain=False)
    assert [admission.request.request_id for admission in news.admissions] == [4]
    assert news.end_of_input
    assert not bench.desk.ready()
    bench.now_s = 103.0
    bench.finish(3, 4)
    assert bench.meter.first_from_submission.max_s == 3.0, "waiting for room counts"
    assert bench.meter.first_from_admission.max_s == 2.0 or bench.meter.first_from_admission.max_s == 1.0


def test_requests_come_at_their_times() -> None:
    bench = Bench(1, 2, [1.0, 4.0])
    assert bench.admit() == [0]
    bench.finish(0)
    assert bench.desk.ready()  # to begin
    assert bench.admit() == []
    assert not bench.desk.ready()
    bench.now_s = 101.5
    assert bench.desk.ready()
    assert bench.admit() == [1]
    bench.now_s = 104.0
    assert bench.admit() == [2]
    bench.now_s = 105.5
    bench.finish(1, 2)
    assert bench.meter.first_from_submission.total_s == pytest.approx(4.5 + 1.5)


def test_a_drain_leaves_it_unfinished() -> None:
    bench = Bench(0, 2)
    assert bench.desk.news(drain=True).admissions == ()
    assert bench.desk.close(drained=True) is ExitCode.DRAINED


def test_arrivals_have_the_rate_and_depend_on_the_seed_only() -> None:
    times = poisson_arrivals(4000, 8.0, -5)
    assert times == poisson_arrivals(4000, 8.0, -5) != poisson_arrivals(4000, 8.0, 6)
    assert all(later > earlier for earlier, later in itertools.pairwise(times))
    assert times[-1] == pytest.approx(500, rel=0.05)
