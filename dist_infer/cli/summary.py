"""`--summary OUT.json`: what a job did and how fast, also where it failed or was drained. Rank 0 writes it."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dist_infer.errors import ExitCode, UsageError
from dist_infer.intake.record_file import write_atomically
from dist_infer.metrics import ServingMeter

SCHEMA = 1

_log = logging.getLogger(__name__)


class CountedJob(Protocol):
    """What a frontend has done."""

    num_done: int  # well or badly
    num_failed: int


class RunSummary:
    """Collects while the job runs; `write` says how it ended. Without a path, or on another rank, it only collects."""

    def __init__(
        self, path: str | None, clock: Callable[[], float] = time.perf_counter, *, writes: bool = True
    ) -> None:
        self.wanted = path is not None
        self._path = Path(path) if path is not None and writes else None
        self.clock = clock
        self._marked_s = clock()
        self._phases: dict[str, float] = {}
        self.meter = ServingMeter(clock)
        self.job: CountedJob | None = None
        self.num_resumed = 0
        self.facts: dict[str, object] = {}
        self.reports: list[Mapping[str, object]] = []  # of all ranks, where they came to the end together

    def check(self, others: Sequence[str | None]) -> None:
        """The file may be written, and is none of `others`.

        Errors: UsageError.
        """
        if self._path is None:
            return
        if self._path.is_dir() or not self._path.parent.is_dir():
            raise UsageError(f"--summary {self._path}: give a file in a folder that exists")
        if any(other is not None and self._path.resolve() == Path(other).resolve() for other in others):
            raise UsageError(f"--summary {self._path} is the input or the output: give another file")

    def mark(self, phase: str) -> None:
        """What has passed since the last mark was this phase."""
        now = self.clock()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._marked_s
        self._marked_s = now

    def told(self, serve: Callable[[], int]) -> int:
        """The exit code of `serve`, written down with all else; so is its error, which goes on."""
        try:
            code = serve()
            self.mark("serve")
            self.write(code)
        except BaseException as error:
            self.mark("serve" if self.job is not None else "until the failure")
            self.write(int(getattr(error, "exit_code", ExitCode.ERROR)), f"{type(error).__name__}: {error}")
            raise
        return code

    def write(self, exit_code: int, error: str | None = None) -> None:
        """Write the file, whole or not at all; a disk that doesn't take it is logged, the job has ended anyway."""
        if self._path is None:
            return
        try:
            write_atomically(self._path, json.dumps(self.fields(exit_code, error), indent=2).encode() + b"\n")
        except OSError as failed:
            _log.error("can't write the summary %s: %s", self._path, failed.strerror)

    def fields(self, exit_code: int, error: str | None) -> dict[str, object]:
        """The whole of the file. Units: seconds, bytes."""
        meter, serve_s = self.meter, self._phases.get("serve", 0.0)
        num_done = self.job.num_done if self.job is not None else 0
        num_failed = self.job.num_failed if self.job is not None else 0
        return {
            "schema": SCHEMA,
            "exit_code": exit_code,
            "outcome": "failed" if error is not None else _OUTCOMES.get(exit_code, "failed"),
            "error": error,
            "requests": {"ok": num_done - num_failed, "failed": num_failed, "resumed": self.num_resumed},
            "tokens": {"prompt": meter.prompt_tokens, "output": meter.output_tokens},
            "seconds": self._phases,
            "per_second": {
                "output_tokens": _rate(meter.output_tokens, serve_s),
                "total_tokens": _rate(meter.prompt_tokens + meter.output_tokens, serve_s),
                "requests": _rate(num_done, serve_s),
            },
            "latency_s": {
                "first_token_from_submission": meter.first_from_submission.summary(),
                "first_token_from_admission": meter.first_from_admission.summary(),
                "between_tokens": meter.between_tokens.summary(),
                "per_later_token": meter.per_later_token.summary(),
                "whole_request": meter.whole_request.summary(),
            },
            "ranks": self.reports,
            **self.facts,
        }


_OUTCOMES: Mapping[int, str] = {
    ExitCode.DONE: "done",
    ExitCode.FAILED_REQUESTS: "done with failed requests",
    ExitCode.DRAINED: "drained",
}


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
