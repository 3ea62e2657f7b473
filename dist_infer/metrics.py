"""Times of requests as rank 0 sees them, in little memory however many tokens there are."""

import math
import time
from collections.abc import Callable, Sequence
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
    submitted_s: float
    admitted_s: float
    first_s: float = 0.0  # of its tokens, as last_s
    last_s: float = 0.0
    num_tokens: int = 0


class ServingMeter:
    """Times of all requests of a job.

    A request is submitted when serving begins, unless `submitted` says when, because the whole input is there from then
    on; it is admitted when the ranks are told of it. Tokens that come together share the time since those before them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Serving begins; what came before doesn't count."""
        self._started_s = self._clock()
        self._open: dict[int, _Open] = {}
        self._submitted_s: dict[int, float] = {}
        self.first_from_submission = Histogram()
        self.first_from_admission = Histogram()
        self.between_tokens = Histogram()
        self.per_later_token = Histogram()  # one value a request: its mean time between tokens
        self.whole_request = Histogram()  # from submission to the last token
        self.prompt_tokens = 0
        self.output_tokens = 0

    def submitted(self, request: Request, at_s: float) -> None:
        """A request that arrives at `at_s` of the clock."""
        self._submitted_s[request.request_id] = at_s

    def admitted(self, request: Request) -> None:
        """The ranks are told of it."""
        submitted_s = self._submitted_s.pop(request.request_id, self._started_s)
        self._open[request.request_id] = _Open(submitted_s, self._clock())
        self.prompt_tokens += len(request.prompt_ids)

    def delivered(self, outputs: Sequence[StepOutput]) -> None:
        """Tokens, or the end, of requests; those that were not admitted are ignored."""
        now = self._clock()
        num_later: dict[tuple[float, int], int] = {}  # tokens by (those before came at, tokens at once): few entries
        for output in outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue
            if count := len(output.token_ids):
                if entry.num_tokens:
                    together = (entry.last_s, count)
                    num_later[together] = num_later.get(together, 0) + count
                else:
                    entry.first_s = now
                    self.first_from_submission.add(now - entry.submitted_s)
                    self.first_from_admission.add(now - entry.admitted_s)
                entry.last_s = now
                entry.num_tokens += count
                self.output_tokens += count
            if output.finish_reason is not None:
                self._finished(output.request_id, entry)
        for (last_s, count), num_tokens in num_later.items():
            self.between_tokens.add((now - last_s) / count, num_tokens)

    def forget(self, request_id: int) -> None:
        """Nothing more comes."""
        self._open.pop(request_id, None)

    def _finished(self, request_id: int, entry: _Open) -> None:
        del self._open[request_id]
        if entry.num_tokens:
            self.whole_request.add(entry.last_s - entry.submitted_s)
        if entry.num_tokens > 1:
            self.per_later_token.add((entry.last_s - entry.first_s) / (entry.num_tokens - 1))
