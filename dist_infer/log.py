"""Logging and progress on standard error. Standard output belongs to the answers.

A line reads `2026-01-31T12:00:00.123+01:00 node7 [3/8] INFO message`. Progress is a bar for a person at a
terminal; under a launcher, where the output of ranks is merged, it is one plain line each 10 seconds.
"""

import logging
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LogLevel = Literal["debug", "info", "warning", "error"]
LINE_INTERVAL_S = 10.0

_logger = logging.getLogger(__name__)


class _Formatter(logging.Formatter):
    def __init__(self, *, host: str, rank: int, size: int) -> None:
        super().__init__(f"%(asctime)s {host.replace('%', '%%')} [{rank}/{size}] %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - logging's name
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is at that moment: a progress bar replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as the handlers of logging do: a log line must not end the job
            self.handleError(record)


def setup_logging(*, level: LogLevel, host: str, rank: int, size: int) -> None:
    """Send the log of all dist_infer modules to standard error. A later call replaces what an earlier one set up."""
    logger = logging.getLogger("dist_infer")
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(host=host, rank=rank, size=size))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class ProgressView(Protocol):
    """Shows how far the job is."""

    def update(self, *, done: int, failed: int, known: int, all_known: bool, output_tokens: int) -> None:
        """Take the counts of now; cheap, so it may be called each step.

        `known` counts the requests read so far, all of them where `all_known`.
        """

    def close(self) -> None:
        """Show the last state."""


def open_progress(*, under_launcher: bool, answers_on_stdout: bool) -> ProgressView:
    """A bar on a terminal without a launcher, else plain lines; answers on the terminal leave no room for a bar."""
    if under_launcher or not sys.stderr.isatty() or (answers_on_stdout and sys.stdout.isatty()):
        return LineProgress()
    return BarProgress(sys.stderr)


class LineProgress:
    """One log line each LINE_INTERVAL_S."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = _Rate(clock())
        self._state = ""

    def update(self, *, done: int, failed: int, known: int, all_known: bool, output_tokens: int) -> None:
        """Log a line if it is time for one."""
        now = self._clock()
        self._state = f"requests {done}/{known}{'' if all_known else '+'} done"
        if failed:
            self._state += f", {failed} failed"
        self._rate.count(output_tokens)
        if now - self._rate.since >= LINE_INTERVAL_S:
            _logger.info("%s, %.1f tok/s", self._state, self._rate.take(now))

    def close(self) -> None:
        """Log the last line."""
        if self._state:
            _logger.info("%s, %.1f tok/s overall", self._state, self._rate.overall(self._clock()))


class BarProgress:
    """A rich bar below the log."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = _Rate(clock())
        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(file=stream),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("requests", total=None, note="")

    def update(self, *, done: int, failed: int, known: int, all_known: bool, output_tokens: int) -> None:
        """Move the bar, and show it the first time; its length is known once all input is read."""
        self._progress.start()
        self._rate.count(output_tokens)
        now = self._clock()
        note = f"{self._rate.overall(now):.1f} tok/s" + (f", {failed} failed" if failed else "")
        self._progress.update(self._task, completed=done, total=known if all_known else None, note=note)

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._progress.stop()


class _Rate:
    """Tokens a second, since the start and since the last line."""

    def __init__(self, now: float) -> None:
        self.since = now
        self._start = now
        self._tokens = 0
        self._tokens_then = 0

    def count(self, tokens: int) -> None:
        self._tokens = tokens

    def take(self, now: float) -> float:
        rate = (self._tokens - self._tokens_then) / max(now - self.since, 1e-9)
        self.since, self._tokens_then = now, self._tokens
        return rate

    def overall(self, now: float) -> float:
        return self._tokens / max(now - self._start, 1e-9)
