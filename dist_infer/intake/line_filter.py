"""The lines that this job answers: those of its shard that no earlier run has answered."""

from dataclasses import dataclass

from dist_infer.intake.batch_file import Line, Lines
from dist_infer.intake.resume import AnsweredLines

_MAX_SKIPPED = 10_000  # lines in one call: skipping a long input must not stop the steps


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th line, from line `number` on: part `number` of `count`, from 1."""

    number: int = 1
    count: int = 1

    def holds(self, line: int) -> bool:
        """The line is in this part."""
        return (line - self.number) % self.count == 0


class LineFilter:
    """Lines without those of other shards and those that have been answered."""

    def __init__(self, lines: Lines, *, shard: Shard, answered: AnsweredLines) -> None:
        self._lines = lines
        self._shard = shard
        self._answered = answered

    def ended(self) -> bool:
        """No line will come any more."""
        return self._lines.ended()

    def ready(self) -> bool:
        """`take` gets on: to a line, past some that are skipped, or to the end."""
        return self._lines.ready()

    def take(self) -> Line | None:
        """The next line of this job, None if none is there yet.

        Errors: DistInferError when a line is not the one that was answered.
        """
        for _ in range(_MAX_SKIPPED):
            line = self._lines.take()
            if line is None or not self._is_skipped(line):
                return line
        return None

    def close(self) -> None:
        """Give the file back."""
        self._lines.close()

    def _is_skipped(self, line: Line) -> bool:
        return not self._shard.holds(line.number) or self._answered.holds(line.number, line.digest)
