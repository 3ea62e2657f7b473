"""What the ranks of one launch wrote down, and who is to blame when they did not come to the end."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rank_child import DEFAULT_TIMEOUT_S

_TAIL_CHARS = 6000


@dataclass
class RankLog:
    """One rank: the tests that it started and finished, in order, and their reports with the time of each."""

    started: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    reports: dict[str, list[tuple[float, dict[str, Any]]]] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S  # of the test that it started last

    @staticmethod
    def order(folder: Path, node_ids: list[str]) -> None:
        """Write down what the ranks are to run."""
        (folder / "tests.json").write_text(json.dumps(node_ids))

    @classmethod
    def read(cls, folder: Path, rank: int) -> "RankLog":
        """What the rank has written so far."""
        log = cls()
        for line in _text(folder / f"rank{rank}.jsonl").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # half a line: the rank was killed, or is about to write the rest
            if entry["event"] == "start":
                log.started.append(entry["node_id"])
                log.timeout_s = entry["timeout_s"]
            elif entry["event"] == "finish":
                log.finished.append(entry["node_id"])
            else:
                log.reports.setdefault(entry["node_id"], []).append((entry["time"], entry["report"]))
        return log


@dataclass
class Launch:
    """A launch that is over."""

    node_ids: list[str]
    logs: list[RankLog]
    stacks: list[str]
    output: str
    returncode: int
    timed_out: bool

    @classmethod
    def read(cls, folder: Path, node_ids: list[str], *, size: int, returncode: int, timed_out: bool) -> "Launch":
        """Collect the files that `size` ranks left in `folder`."""
        return cls(
            node_ids=node_ids,
            logs=[RankLog.read(folder, rank) for rank in range(size)],
            stacks=[_text(folder / f"rank{rank}.stacks") for rank in range(size)],
            output=_text(folder / "output.txt"),
            returncode=returncode,
            timed_out=timed_out,
        )

    def is_complete(self, node_id: str) -> bool:
        """Whether all ranks finished the test."""
        return all(node_id in log.finished for log in self.logs)

    def failures(self, node_id: str) -> list[tuple[int, dict[str, Any]]]:
        """(rank, report) of each phase that failed, the earliest first."""
        found = [
            (at, rank, report)
            for rank, log in enumerate(self.logs)
            for at, report in log.reports.get(node_id, [])
            if report["outcome"] == "failed"
        ]
        return [(rank, report) for _, rank, report in sorted(found, key=lambda entry: entry[:2])]

    def first_failed(self) -> str | None:
        """The first test in order that failed on any rank; what failed after it may be a consequence."""
        return next((node_id for node_id in self.node_ids if self.failures(node_id)), None)

    def first_unfinished(self) -> str | None:
        """The first test that some rank started and not all ranks finished."""
        started = {node_id for log in self.logs for node_id in log.started}
        return next((n for n in self.node_ids if n in started and not self.is_complete(n)), None)

    def account(self) -> str:
        """How the launch ended, what each rank was doing then, stacks and last output."""
        ended = "the deadline was over" if self.timed_out else f"the launcher ended with code {self.returncode}"
        lines = [ended]
        for rank, log in enumerate(self.logs):
            running = [node_id for node_id in log.started if node_id not in log.finished]
            state = (
                f"was in {running[-1]}" if running else "had finished all it started" if log.started else "ran no test"
            )
            lines.append(f"  rank {rank} {state}")
        lines += [f"---- stacks of rank {rank} ----\n{stack}" for rank, stack in enumerate(self.stacks) if stack]
        lines.append(f"---- last output ----\n{self.output[-_TAIL_CHARS:]}")
        return "\n".join(lines)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
