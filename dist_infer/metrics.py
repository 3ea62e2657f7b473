"""Times of requests as rank 0 sees them, in little memory however many tokens there are."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dist_infer.types import Request, StepOutput

_SMALLEST_S = 1e-6
_GROWTH = 1.02  # a bucket's upper border is so much above its lower one: quantiles are within 1 %


@dataclass(slots=True)
class Histogram:
    """How often which time came. Units: seconds."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value_s: float, times: int = 1) -> None:
        """`times` equal values."""
        bucket = max(0, math.ceil(math.log(max(value_s, _SMALLEST_S) / _SMALLEST_S, _GROWTH)))
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times
        self.count += times
        self.total_s += value_s * times
        self.max_s = max(self.max_s, value_s)

    def quantile(self, share: float) -> float | None:
        """The least time that is not below `share` of them; None where there is none."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= share * self.count:
                return float(min(self.max_s, _SMALLEST_S * _GROWTH ** (bucket - 0.5)))
        return None

    def summary(self) -> dict[str, float | int | None]:
        """Count, mean, quantiles, largest."""
        return {
            "count": self.count,
            "mean": self.total_s / self.count if self.count else None,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.max_s if self.count else None,
        }


@dataclass(slots=True)
class _Open:
    admitted_s: float
    last_s: float | None = None  # when tokens came last


class ServingMeter:
    """Times of all requests of a job.

    A request is submitted when serving begins, because the whole input is there from then on, and admitted when the
    ranks are told of it. Tokens that come together share the time since those before them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_s = clock()
        self._open: dict[int, _Open] = {}
        self.first_from_submission = Histogram()
        self.first_from_admission = Histogram()
        self.between_tokens = Histogram()
        self.prompt_tokens = 0
        self.output_tokens = 0

    def start(self) -> None:
        """Serving begins."""
        self._started_s = self._clock()

    def admitted(self, request: Request) -> None:
        """The ranks are told of it."""
        self._open[request.request_id] = _Open(self._clock())
        self.prompt_tokens += len(request.prompt_ids)

    def delivered(self, output: StepOutput) -> None:
        """Tokens, or the end, of a request; one that was not admitted is ignored."""
        entry = self._open.get(output.request_id)
        if entry is None:
            return
        now, count = self._clock(), len(output.token_ids)
        if count:
            self.output_tokens += count
            if entry.last_s is None:
                self.first_from_submission.add(now - self._started_s)
                self.first_from_admission.add(now - entry.admitted_s)
            else:
                self.between_tokens.add((now - entry.last_s) / count, count)
            entry.last_s = now
        if output.finish_reason is not None:
            self.forget(output.request_id)

    def forget(self, request_id: int) -> None:
        """Nothing more comes."""
        self._open.pop(request_id, None)
