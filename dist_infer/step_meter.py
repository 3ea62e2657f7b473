"""How long the steps of a rank keep its device busy, and how long the device waits for the next step.

A step is timed from the start of the copy of its inputs to the end of its sampling. On a GPU events in its stream tell
both, so nobody waits and the host's work beside a running step doesn't show; on a CPU the host's clock does.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from dist_infer.comm.agreement import Decision
from dist_infer.types import Batch

S = TypeVar("S")
R = TypeVar("R", covariant=True)


class TimedSteps(Protocol[S, R]):
    """What runs the steps: the step runner of the engine."""

    def graph_bucket(self, batch: Batch) -> int:
        """Rows of the graph that could run this batch."""

    def prepare(self, batch: Batch) -> S:
        """Inputs on the device."""

    def launch(self, step: S, decision: Decision) -> R:
        """Forward and sampling."""


class Marks(Protocol):
    """Points in the work of a device."""

    def mark(self) -> Any:
        """One behind all work so far."""

    def is_past(self, mark: Any) -> bool:
        """The work before it is done."""

    def between_us(self, first: Any, second: Any) -> float:
        """From one to another, both past."""


class HostMarks:
    """For a device whose work ends before a call returns."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> float:
        """See Marks."""
        return self._clock()

    def is_past(self, mark: float) -> bool:
        """See Marks."""
        return True

    def between_us(self, first: float, second: float) -> float:
        """See Marks."""
        return (second - first) * 1e6


class CudaMarks:
    """Events of the current stream."""

    def mark(self) -> torch.cuda.Event:
        """See Marks."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """See Marks."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def between_us(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See Marks."""
        return float(first.elapsed_time(second)) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of one step. `gap_us` is the device's time since the step before it; None for the first one."""

    batch: Batch
    decision: Decision
    busy_us: float
    gap_us: float | None


class TimedRunner(Generic[S, R]):
    """A step runner that tells `on_step` of each step, in order, once the device is done with it."""

    def __init__(self, inner: TimedSteps[S, R], marks: Marks, on_step: Callable[[StepTimes], None]) -> None:
        self._inner = inner
        self._marks = marks
        self._on_step = on_step
        self._prepared: tuple[Batch, Any] | None = None
        self._open: deque[tuple[Batch, Decision, Any, Any]] = deque()  # with the marks of begin and end
        self._last_end: Any = None

    def graph_bucket(self, batch: Batch) -> int:
        """See TimedSteps."""
        return self._inner.graph_bucket(batch)

    def prepare(self, batch: Batch) -> S:
        """See TimedSteps."""
        self._prepared = batch, self._marks.mark()
        return self._inner.prepare(batch)

    def launch(self, step: S, decision: Decision) -> R:
        """See TimedSteps. Errors: ValueError without a `prepare` before it."""
        if self._prepared is None:
            raise ValueError("a step is launched that was not prepared here")
        tokens = self._inner.launch(step, decision)
        (batch, begun), self._prepared = self._prepared, None
        self._open.append((batch, decision, begun, self._marks.mark()))
        self.tell()
        return tokens

    def tell(self) -> None:
        """Tell of the steps that are done."""
        marks = self._marks
        while self._open and marks.is_past(self._open[0][3]):
            batch, decision, begun, ended = self._open.popleft()
            gap_us = None if self._last_end is None else marks.between_us(self._last_end, begun)
            self._last_end = ended
            busy_us = marks.between_us(begun, ended)
            self._on_step(StepTimes(batch=batch, decision=decision, busy_us=busy_us, gap_us=gap_us))
