"""`pytest -n 2`: which of pytest-xdist's workers runs what.

A file is one unit, because what its tests share is made once; so are all rank tests of a world size, because they are
one launch. The first worker takes units from one end of the list, where those are that start jobs of several processes;
the others take from the other end, where tests compute in their own process. So two jobs hardly ever compete for the
cores, and all workers end together.
"""

import re

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

FIRST_WORKER = "gw0"
# After the launches of rank tests, longest first.
FILES_WITH_JOBS = (
    "tests/cli/test_job.py",
    "tests/test_slurm.py",
    "tests/test_faults.py",
    "tests/test_rank_parent.py",
    "tests/launch/test_failure.py",
    "tests/test_hosts.py",
    "tests/launch/test_pytest_world.py",
    "tests/cli/test_bench_run.py",
    "tests/launch/test_guard.py",
    "tests/cli/test_run.py",
    "tests/launch/test_preflight.py",
    "tests/test_demo.py",
    "tests/launch/test_watchdog.py",
    "tests/test_moe_job.py",
    "tests/launch/test_mpirun.py",
    "tests/launch/test_signals.py",
    "tests/cli/test_doctor.py",
)
_LAUNCH = re.compile(r"[\[-](\d+ ranks?)[\]-]")


def unit(node_id: str) -> str:
    """What a test belongs to: the launch of its world size, or its file."""
    launch = _LAUNCH.search(node_id)
    return launch[1] if launch else node_id.partition("::")[0]


def put_jobs_first(items: list[pytest.Item]) -> None:
    """Launches, largest first, then the files with jobs, then the others as they were."""
    places = {file: idx for idx, file in enumerate(FILES_WITH_JOBS)}

    def place(item: pytest.Item) -> int:
        name = unit(item.nodeid)
        launch = _LAUNCH.search(item.nodeid)
        return -int(name.partition(" ")[0]) if launch else places.get(name, len(places))

    items.sort(key=place)


class TwoEnds(LoadScopeScheduling):  # type: ignore[misc]
    """Units in the order of collection, from both ends."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if node.gateway.id != FIRST_WORKER:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)
