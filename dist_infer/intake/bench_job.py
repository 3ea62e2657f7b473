"""The frontend of a benchmark: requests that arrive at set times, and nothing written. It lives on rank 0.

A warm-up goes first; the measured requests arrive when all of it has ended, so kernels are compiled and graphs are
captured by then.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dist_infer.dispatcher import Incoming
from dist_infer.errors import ExitCode
from dist_infer.metrics import ServingMeter
from dist_infer.types import Request, StepOutput


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each of `count` requests comes, at `rate` a second on average. Units: seconds from the start."""
    gaps = np.random.default_rng([seed % 2**64, 2]).exponential(1 / rate, count)
    return [float(time) for time in np.cumsum(gaps)]


class BenchJob:
    """Serves one benchmark; the Frontend of the dispatcher.

    `arrivals_s` count from the end of the warm-up, None: all requests are there at once. `on_warm` is called when the
    measured part begins.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        warmup: Sequence[Request],
        arrivals_s: Sequence[float] | None,
        meter: ServingMeter,
        clock: Callable[[], float],
        on_warm: Callable[[], None] = lambda: None,
    ) -> None:
        self._requests = requests
        self._warmup = warmup
        self._arrivals_s = arrivals_s
        self._meter = meter
        self._clock = clock
        self._on_warm = on_warm
        self._num_handed = 0  # of the part that runs
        self._open: set[int] = set()
        self._started_s: float | None = None
        self.num_done = 0
        self.num_failed = 0

    @property
    def exit_code(self) -> ExitCode:
        """Nothing is refused here, so nothing fails alone."""
        return ExitCode.DONE

    @property
    def exhausted(self) -> bool:
        """All measured requests were answered."""
        return self.num_done == len(self._requests)

    def poll(self, room: int) -> Incoming:
        """What has arrived, the warm-up first."""
        if self._started_s is None and self._num_handed == len(self._warmup) and not self._open:
            self._begin()
        source, num_there = self._arrived()
        handed = source[self._num_handed : min(num_there, self._num_handed + room)]
        self._num_handed += len(handed)
        self._open.update(request.request_id for request in handed)
        return Incoming(requests=handed, end_of_input=self._all_handed)

    def ready(self) -> bool:
        """A request has arrived, or the end is to be told."""
        return self._all_handed or self._arrived()[1] > self._num_handed or (self._started_s is None and not self._open)

    def deliver(self, output: StepOutput) -> None:
        """Count what has ended; the times are the meter's."""
        if output.finish_reason is not None and output.request_id in self._open:
            self._open.remove(output.request_id)
            self.num_done += self._started_s is not None

    def fail_open(self, message: str) -> None:
        """There is no record to write."""

    def close(self) -> None:
        """There is no output."""

    @property
    def _all_handed(self) -> bool:
        return self._started_s is not None and self._num_handed == len(self._requests)

    def _begin(self) -> None:
        self._started_s = self._clock()
        self._num_handed = 0
        self._meter.start()
        for request, after_s in zip(self._requests, self._arrivals_s or (), strict=False):
            self._meter.submitted(request, self._started_s + after_s)
        self._on_warm()

    def _arrived(self) -> tuple[Sequence[Request], int]:
        """The part that runs, and how many of it are there."""
        if self._started_s is None:
            return self._warmup, len(self._warmup)
        if self._arrivals_s is None:
            return self._requests, len(self._requests)
        passed_s = self._clock() - self._started_s
        return self._requests, int(np.searchsorted(self._arrivals_s, passed_s, side="right"))
