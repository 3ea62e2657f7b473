"""Rank 0's desk: takes requests from a frontend, gives each a group, turns outputs into answers.

Everything here runs on rank 0 only and never waits; what it decides reaches the other ranks as the news of the next
step (rule 1).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from dist_infer.errors import ExitCode, worst_exit_code
from dist_infer.metrics import ServingMeter
from dist_infer.types import Admission, News, Request, StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """What a frontend has: validated requests, ids to abort, whether nothing more will come."""

    requests: Sequence[Request] = ()
    aborts: Sequence[int] = ()
    end_of_input: bool = False


class Frontend(Protocol):
    """Where requests come from and answers go to: a batch file, later a server. Never blocks."""

    @property
    def exit_code(self) -> ExitCode:
        """DONE, or FAILED_REQUESTS when a request was answered with an error."""

    @property
    def exhausted(self) -> bool:
        """All input has been read and every request answered."""

    def poll(self, room: int) -> Incoming:
        """At most `room` new requests, and what else has come."""

    def ready(self) -> bool:
        """`poll` would give something."""

    def deliver(self, output: StepOutput) -> None:
        """Take new tokens or the end of a request; unknown (aborted) ids are dropped."""

    def fail_open(self, message: str) -> None:
        """Answer every open request with an error record (rule 19)."""

    def close(self) -> None:
        """Write out and close the output."""


@dataclass(slots=True)
class _Open:
    group: int
    tokens: int  # still to compute, at most


@dataclass(slots=True)
class Dispatcher:
    """Balances requests over `num_groups` by outstanding tokens, with at most `max_inflight` requests alive.

    Requests that a drain has not finished within `grace_s` are given back too, without an answer.
    """

    frontend: Frontend
    num_groups: int
    max_inflight: int
    meter: ServingMeter = field(default_factory=ServingMeter)
    grace_s: float | None = None  # None: as long as it takes
    clock: Callable[[], float] = time.monotonic
    _drain_began: float | None = None
    _open: dict[int, _Open] = field(default_factory=dict)
    _load: list[int] = field(init=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._load = [0] * self.num_groups

    def ready(self) -> bool:
        """There is something to put into the news."""
        return not self._ended and self.frontend.ready()

    def news(self, *, drain: bool) -> News:
        """The news of this step. While draining nothing more is admitted (rule 14); aborts still travel."""
        room = 0 if drain or self._ended else max(0, self.max_inflight - len(self._open))
        incoming = self.frontend.poll(room)
        admissions = self._admit(incoming.requests)  # first: an abort may name one of them
        given_up = [*self._open] if drain and self._grace_is_over() else []
        aborts = tuple(request_id for request_id in (*incoming.aborts, *given_up) if self._close(request_id))
        self._ended = self._ended or incoming.end_of_input
        return News(admissions=admissions, aborts=aborts, end_of_input=incoming.end_of_input)

    def deliver(self, outputs: Sequence[StepOutput]) -> None:
        """Hand on what a group has produced."""
        self.meter.delivered(outputs)
        for output in outputs:
            if (entry := self._open.get(output.request_id)) is None:
                continue  # aborted: what was still in flight is dropped
            entry.tokens -= len(output.token_ids)
            self._load[entry.group] -= len(output.token_ids)
            if output.finish_reason is not None:
                self._close(output.request_id)
            self.frontend.deliver(output)

    def _grace_is_over(self) -> bool:
        now = self.clock()
        if self._drain_began is None:
            self._drain_began = now
        return self.grace_s is not None and now - self._drain_began >= self.grace_s

    def close(self, *, drained: bool) -> ExitCode:
        """Close the output. DRAINED when a stop left requests or input unanswered."""
        self.frontend.close()
        left_over = drained and not self.frontend.exhausted
        return worst_exit_code([self.frontend.exit_code, ExitCode.DRAINED if left_over else ExitCode.DONE])

    def fail_open(self, message: str) -> None:
        """Rule 19: answer what is open with an error, as far as the output can still be written."""
        with suppress(Exception):  # the error that ends the job is the one to be shown
            self.frontend.fail_open(message)
        with suppress(Exception):
            self.frontend.close()

    def _admit(self, requests: Sequence[Request]) -> tuple[Admission, ...]:
        """Longest first to the group with the fewest outstanding tokens; admitted in order of arrival."""
        group_of: dict[int, int] = {}
        for request in sorted(requests, key=_cost, reverse=True):
            group = min(range(self.num_groups), key=lambda g: (self._load[g], g))
            group_of[request.request_id] = group
            self._open[request.request_id] = _Open(group, _cost(request))
            self._load[group] += _cost(request)
            self.meter.admitted(request)
        return tuple(Admission(group=group_of[request.request_id], request=request) for request in requests)

    def _close(self, request_id: int) -> bool:
        if (entry := self._open.pop(request_id, None)) is None:
            return False
        self._load[entry.group] -= entry.tokens
        self.meter.forget(request_id)
        return True


def _cost(request: Request) -> int:
    """Tokens that a request may still need."""
    return len(request.prompt_ids) + request.sampling.max_tokens
