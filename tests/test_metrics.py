"""Histograms against sorted lists; the times of requests by a clock that the test moves."""

import math
from random import Random

import pytest

from dist_infer.metrics import Histogram, ServingMeter
from dist_infer.types import Request, StepOutput


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_within_a_percent(seed: int, share: float) -> None:
    random = Random(seed)
    values = [10 ** random.uniform(-5, 3) for _ in range(random.choice([1, 2, 999]))]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.0101)
    assert histogram.count == len(values)
    assert histogram.total_s == pytest.approx(sum(values))
    assert histogram.max_s == max(values)


def test_nothing_and_next_to_nothing() -> None:
    assert Histogram().summary() == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    histogram = Histogram()
    histogram.add(0.0, times=3)
    assert histogram.summary() == {"count": 3, "mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


def test_memory_does_not_grow_with_the_values() -> None:
    random, histogram = Random(0), Histogram()
    for _ in range(20_000):
        histogram.add(10 ** random.uniform(-6, 4))
    assert len(histogram._buckets) < 1300


def output(request_id: int, count: int, *, ends: bool = False) -> StepOutput:
    return StepOutput(request_id=request_id, token_ids=(7,) * count, finish_reason="stop" if ends else None)


def test_times_of_requests() -> None:
    now = [100.0]
    meter = ServingMeter(lambda: now[0])
    now[0] = 200.0
    meter.start()
    now[0] = 203.0
    meter.admitted(Request(request_id=1, prompt_ids=(1, 2, 3)))
    now[0] = 204.0
    meter.delivered([output(1, 0)])
    assert meter.first_from_admission.count == 0
    now[0] = 205.0
    meter.delivered([output(1, 1)])
    assert (meter.first_from_submission.max_s, meter.first_from_admission.max_s) == (5.0, 2.0)
    now[0] = 209.0
    meter.delivered([output(1, 4, ends=True)])  # four tokens in four seconds
    assert (meter.between_tokens.count, meter.between_tokens.max_s, meter.between_tokens.total_s) == (4, 1.0, 4.0)
    now[0] = 300.0
    meter.delivered([output(1, 1), output(2, 1)])  # after its end, and of nobody
    assert (meter.prompt_tokens, meter.output_tokens) == (3, 5)
    assert meter.between_tokens.count == 4 and meter.first_from_admission.count == 1
    assert (meter.per_later_token.max_s, meter.whole_request.max_s) == (1.0, 9.0)


def test_tokens_of_one_step_share_their_gap() -> None:
    now = [0.0]
    meter = ServingMeter(lambda: now[0])
    for request_id in range(3):
        meter.admitted(Request(request_id=request_id, prompt_ids=(1,)))
    for now[0], ids in ((1.0, (0, 1)), (2.0, (0, 1, 2)), (5.0, (0, 2))):
        meter.delivered([output(request_id, 1) for request_id in ids])
    assert sorted(meter.between_tokens._buckets.values()) == [2, 2]
    assert (meter.between_tokens.count, meter.between_tokens.total_s) == (4, 8.0)


def test_the_time_of_submission_may_be_told_and_a_start_forgets() -> None:
    now = [0.0]
    meter = ServingMeter(lambda: now[0])
    meter.admitted(Request(request_id=1, prompt_ids=(1,)))
    meter.delivered([output(1, 1)])
    now[0] = 10.0
    meter.start()
    assert (meter.prompt_tokens, meter.output_tokens, meter.first_from_submission.count) == (0, 0, 0)
    meter.submitted(Request(request_id=2, prompt_ids=(1,)), 12.0)
    now[0] = 15.0
    meter.admitted(Request(request_id=2, prompt_ids=(1,)))
    now[0] = 16.0
    meter.delivered([output(1, 1), output(2, 1, ends=True)])
    assert (meter.first_from_submission.max_s, meter.first_from_admission.max_s) == (4.0, 1.0)
    assert (meter.whole_request.max_s, meter.per_later_token.count, meter.output_tokens) == (4.0, 0, 1)


def test_a_request_that_is_given_up_is_forgotten() -> None:
    meter = ServingMeter()
    meter.admitted(Request(request_id=1, prompt_ids=(1,)))
    meter.forget(1)
    meter.forget(1)
    meter.delivered([output(1, 1)])
    assert meter.output_tokens == 0
