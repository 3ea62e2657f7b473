"""What the suite says about itself: seconds a file, each reason for skipping once, in CI no skip that could be cured.

A skip whose reason begins with "gpu:" (no such device) or "host:" (this machine can't) is accepted everywhere. Any
other is fine on a user's machine and a failure where CI=true: apt, pip or root could have cured it, or it has no tag.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Generator
from typing import Any

import pytest

from tests.rank_parent import is_rank_test

INCURABLE = ("gpu:", "host:")
_SLOW_S = 1.0
_LAUNCHES = "launches of rank tests, all but the tests"


class SuiteReport:
    """pytest plugin of the parent; where pytest-xdist deals the tests out, of each worker and of the one who deals."""

    def __init__(self, config: pytest.Config, *, in_ci: bool) -> None:
        self.config = config
        self.in_ci = in_ci
        self.seconds: dict[str, float] = defaultdict(float)
        self.reasons: Counter[str] = Counter()
        self.rank_tests: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        start = time.perf_counter()
        if is_rank_test(item):
            self.rank_tests.add(item.nodeid)
        try:
            return (yield)
        finally:
            name = _LAUNCHES if is_rank_test(item) else _file(item.nodeid)
            self.seconds[name] += time.perf_counter() - start

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
        start = time.perf_counter()
        report = yield
        if isinstance(collector, pytest.Module):
            self.seconds[collector.nodeid] += time.perf_counter() - start
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        self.check_skip(report)
        if report.nodeid in self.rank_tests:  # a launch runs the tests of many files
            self.seconds[_file(report.nodeid)] += report.duration
            self.seconds[_LAUNCHES] -= report.duration
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> Generator[None, object, object]:
        self.check_skip(report)
        return (yield)

    def check_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Count a skip, or turn it into a failure where it should not happen."""
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if self.in_ci and not reason.startswith(INCURABLE):
            report.outcome = "failed"
            report.longrepr = f"CI=true allows no skip that apt, pip or root could cure: {reason}"
        else:
            self.reasons[reason] += 1

    def pytest_sessionfinish(self) -> None:
        """A worker hands its seconds over; it has handed over all reports."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["seconds"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the seconds of a worker, unless it has crashed."""
        for file, seconds in getattr(node, "workeroutput", {}).get("seconds", {}).items():
            self.seconds[file] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.reasons:
            terminalreporter.section("skipped")
            for reason, count in self.reasons.most_common():
                terminalreporter.write_line(f"{count:5}  {reason}")
        terminalreporter.section("seconds a file")
        slow = {file: s for file, s in self.seconds.items() if s >= _SLOW_S}
        for file, seconds in sorted(slow.items(), key=lambda entry: -entry[1]):
            terminalreporter.write_line(f"{seconds:7.1f}  {file}")
        total = sum(self.seconds.values())
        terminalreporter.write_line(f"{total - sum(slow.values()):7.1f}  {len(self.seconds) - len(slow)} other files")
        terminalreporter.write_line(f"{total:7.1f}  all")


def _file(node_id: str) -> str:
    return node_id.partition("::")[0]
