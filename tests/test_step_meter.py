"""Busy and idle times of steps, by a device whose clock the test turns."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dist_infer.comm.agreement import Decision
from dist_infer.step_meter import HostMarks, StepTimes, TimedRunner
from dist_infer.types import Batch
from dist_infer.warmup import make_batch
from tests.step_loop import alone

BATCH = make_batch([(1, 9)], block_size=4)


@dataclass
class Device:
    """Does its work in order: marks are times at which it passes them."""

    busy_until_us: float = 0.0
    now_us: float = 0.0

    def work(self, us: float) -> None:
        self.busy_until_us = max(self.busy_until_us, self.now_us) + us

    def mark(self) -> float:
        return max(self.busy_until_us, self.now_us)

    def is_past(self, mark: float) -> bool:
        return mark <= self.now_us

    def between_us(self, first: float, second: float) -> float:
        return second - first


@dataclass
class Steps:
    device: Device
    prepared: list[Batch] = field(default_factory=list)

    def graph_bucket(self, batch: Batch) -> int:
        return 7

    def prepare(self, batch: Batch) -> str:
        self.prepared.append(batch)
        self.device.work(2)
        return "inputs"

    def launch(self, step: str, decision: Decision) -> str:
        assert step == "inputs"
        self.device.work(10)
        return "tokens"


@pytest.fixture
def device() -> Device:
    return Device()


def make_runner(device: Device, on_step: Callable[[StepTimes], None]) -> TimedRunner[str, str]:
    return TimedRunner(Steps(device), device, on_step)


def run(runner: TimedRunner[str, str]) -> None:
    assert runner.graph_bucket(BATCH) == 7
    assert runner.launch(runner.prepare(BATCH), alone(BATCH, 7)) == "tokens"


def test_a_step_is_told_of_when_it_is_done_and_gaps_are_the_devices(device: Device) -> None:
    steps: list[StepTimes] = []
    runner = make_runner(device, steps.append)
    run(runner)  # 0 to 12
    device.now_us = 11
    run(runner)  # prepared while the first runs: 12 to 24
    assert not steps
    device.now_us = 30
    run(runner)  # 30 to 42
    assert [(step.busy_us, step.gap_us) for step in steps] == [(12, None), (12, 0)]
    runner.tell()
    assert len(steps) == 2, "the third is not done"
    device.now_us = 42
    runner.tell()
    assert (steps[2].busy_us, steps[2].gap_us) == (12, 6)
    assert steps[2].batch is BATCH and steps[2].decision.graph_bucket == 7


def test_a_step_must_be_prepared(device: Device) -> None:
    runner = make_runner(device, lambda step: None)
    with pytest.raises(ValueError, match="not prepared here"):
        runner.launch("inputs", alone(BATCH, 7))


def test_the_clock_of_the_host() -> None:
    times = iter([1.0, 1.5, 1.75])
    marks = HostMarks(lambda: next(times))
    first, second, third = (marks.mark() for _ in range(3))
    assert marks.is_past(third)
    assert (marks.between_us(first, second), marks.between_us(second, third)) == (5e5, 2.5e5)
