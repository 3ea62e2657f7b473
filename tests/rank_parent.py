"""The parent's side of the rank tests: starts them under mpirun and maps what the ranks recorded onto its own items.

All tests of one world size and one device run in one launch, because each rank pays seconds for importing torch. Every
test has a deadline. A failure ends its launch, so the tests that were still to come go into the next one;
a test is decided only when all ranks have finished it, or when it was the first to fail.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_infer.errors import UsageError
from dist_infer.launch import mpirun
from tests.rank_child import FOLDER_VARIABLE
from tests.rank_log import Launch, RankLog

LAUNCHER_VARIABLE = "DIST_INFER_TESTS_MPIRUN"  # another mpirun than the one beside this Python
MAX_LAUNCHES = 20  # of one size: each test that fails costs one more
START_UP_S = 180.0
_GRACE_S = 5.0  # after a test's own time-out, in which the ranks write down their stacks
_POLL_S = 0.05
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONSAFEPATH": "1"}


def is_rank_test(item: pytest.Item) -> bool:
    """Whether the item runs once on each rank of a world, and not here."""
    return item.get_closest_marker("ranks") is not None and item.get_closest_marker("skip") is None


def world_size(item: pytest.Item) -> int:
    """Ranks that a rank test runs on: what conftest's parametrisation of `world` put there."""
    return int(item.callspec.params["world"])  # type: ignore[attr-defined]


class RankLauncher:
    """pytest plugin of the parent: takes over the run of rank tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.verdicts: dict[str, list[pytest.TestReport]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not is_rank_test(item):
            return None
        if item.nodeid not in self.verdicts:
            self.run_group(
                [other for other in item.session.items if is_rank_test(other) and _group(other) == _group(item)]
            )
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.verdicts[item.nodeid]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # What the test before this one has set up for its file or session would stay, and trip the test after it.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def run_group(self, items: Sequence[pytest.Item]) -> None:
        """Launch until each of the items has a verdict."""
        to_do = {item.nodeid: item for item in items}
        account = "nothing was launched"
        for _ in range(MAX_LAUNCHES):
            try:
                launch = run_launch(list(to_do.values()), self.config)
            except UsageError as error:
                self.verdicts |= {node_id: _skipped(item, f"pip: {error}") for node_id, item in to_do.items()}
                return
            account = launch.account()
            decided = self.judge(launch, to_do)
            for node_id in decided:
                del to_do[node_id]
            if not decided or not to_do:
                break
        text = f"not run: no launch got to this test; the last one: {account}"
        self.verdicts |= {node_id: _failed(item, text) for node_id, item in to_do.items()}

    def judge(self, launch: Launch, items: dict[str, pytest.Item]) -> list[str]:
        """Give a verdict to each test that this launch decided, and name them."""
        culprit = launch.first_failed() or launch.first_unfinished()
        decided = []
        for node_id in launch.node_ids:
            if node_id != culprit and not launch.is_complete(node_id):
                break
            verdict = self.bad_verdict if node_id == culprit else self.good_verdict
            self.verdicts[node_id] = verdict(launch, items[node_id])
            decided.append(node_id)
            if node_id == culprit:
                break
        if decided and culprit is None and launch.returncode != 0:
            last = decided[-1]
            self.verdicts[last] = _failed(items[last], f"all tests had passed, and then {launch.account()}")
        return decided

    def good_verdict(self, launch: Launch, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of the slowest rank, if all ranks say the same."""
        per_rank = [[self._load(data) for _, data in log.reports.get(item.nodeid, [])] for log in launch.logs]
        outcomes = [[(report.when, report.outcome) for report in reports] for reports in per_rank]
        if any(other != outcomes[0] for other in outcomes):
            lines = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)]
            return _failed(item, "the ranks differ, so some ran the test without the others\n" + "\n".join(lines))
        return max(per_rank, key=lambda reports: sum(report.duration for report in reports))

    def bad_verdict(self, launch: Launch, item: pytest.Item) -> list[pytest.TestReport]:
        """The report of the rank that failed first, with those of the others below it."""
        failures = launch.failures(item.nodeid)
        if not failures:
            return _failed(item, launch.account())
        first_rank, data = failures[0]
        report = self._load(data)
        report.sections.insert(0, ("first failure", f"on rank {first_rank} of {len(launch.logs)}"))
        report.sections += [(f"then on rank {rank}", self._load(other).longreprtext) for rank, other in failures[1:]]
        phases = {when: _phase(item, when) for when in ("setup", "call", "teardown")}
        return list((phases | {str(report.when): report}).values())

    def _load(self, data: dict[str, Any]) -> pytest.TestReport:
        hook = self.config.hook.pytest_report_from_serializable
        if isinstance(data["longrepr"], list):  # JSON has no tuples, and a skip's place and reason are one
            data = data | {"longrepr": tuple(data["longrepr"])}
        report: pytest.TestReport = hook(config=self.config, data=dict(data))
        return report


def _group(item: pytest.Item) -> tuple[int, bool]:
    return world_size(item), item.get_closest_marker("gpu") is not None


def _phase(item: pytest.Item, when: Any, outcome: Any = "passed", longrepr: Any = None) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, outcome, longrepr, when, duration=0.0)


def _failed(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    return [_phase(item, "setup"), _phase(item, "call", "failed", text), _phase(item, "teardown")]


def _skipped(item: pytest.Item, reason: str) -> list[pytest.TestReport]:
    where = (str(item.path), item.location[1] or 0, f"Skipped: {reason}")
    return [_phase(item, "setup", "skipped", where), _phase(item, "teardown")]


def run_launch(items: Sequence[pytest.Item], config: pytest.Config) -> Launch:
    """Run the items, all of one group, once on their ranks. Errors: UsageError where there is no mpirun."""
    size = world_size(items[0])
    folder = Path(tempfile.mkdtemp(prefix="dist-infer-ranks-"))
    try:
        node_ids = [item.nodeid for item in items]
        command = _command(items, size, folder, config)
        RankLog.order(folder, node_ids)
        returncode, timed_out = _run(command, folder, size, str(config.rootpath))
        return Launch.read(folder, node_ids, size=size, returncode=returncode, timed_out=timed_out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(items: Sequence[pytest.Item], size: int, folder: Path, config: pytest.Config) -> mpirun.Command:
    module = ["-m", "mpi4py", "-m", "pytest"] if size > 1 else ["-m", "pytest"]
    options = ["-q", "-m", "", "-p", "no:cacheprovider", "--color=no", f"--tb={config.getoption('tbstyle')}"]
    inner = [sys.executable, *module, *options, f"--rootdir={config.rootpath}"]
    inner += dict.fromkeys(str(item.path) for item in items)
    extra_env = _ENVIRONMENT | {FOLDER_VARIABLE: str(folder)}
    if size == 1:  # as users without a launcher run it
        return mpirun.Command(argv=tuple(inner), env=mpirun.scrub(os.environ) | extra_env)
    launcher = mpirun.find_launcher(os.environ.get(LAUNCHER_VARIABLE))
    return mpirun.command(size, inner, launcher=launcher, oversubscribe=True, extra_env=extra_env)


def _run(command: mpirun.Command, folder: Path, size: int, cwd: str) -> tuple[int, bool]:
    with open(folder / "output.txt", "wb") as output:
        process = mpirun.start(command, output=output, cwd=cwd)
        timed_out = False
        try:
            written, since = 0, time.monotonic()
            while process.poll() is None and not timed_out:
                now, progress = time.monotonic(), sum(path.stat().st_size for path in folder.glob("rank*.jsonl"))
                if progress != written:
                    written, since = progress, now
                    limit_s = max(RankLog.read(folder, rank).timeout_s for rank in range(size)) + _GRACE_S
                timed_out = now - since > (limit_s if written else START_UP_S)
                time.sleep(_POLL_S)
        finally:
            returncode = mpirun.stop(process)
    return returncode, timed_out
