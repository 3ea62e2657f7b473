"""Tests dealt out to workers end as they would in one process, and each is dealt out once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rank_parent import is_rank_test, world_size
from tests.source_tree import ROOT
from tests.test_rank_parent import SAMPLES, Session, run_pytest

pytest.importorskip("xdist", reason="pip: pytest-xdist is not installed")

from xdist.remote import Producer

from tests import workers

NODE_IDS = [
    "tests/test_faults.py::test_a",
    "tests/comm/test_wire.py::test_a[2 ranks-7]",
    "tests/comm/test_wire.py::test_b[whole-4 ranks-dtype0]",
    "tests/test_pages.py::test_a",
    "tests/test_pages.py::test_b[4 ranks]",
    "tests/test_pages.py::test_c[2]",
    "tests/launch/test_pool.py::test_a[1 rank]",
    "tests/test_types.py::test_a",
]


class Worker:
    """What the scheduler needs of pytest-xdist's controller of a worker; runs nothing."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def make_scheduler(node_ids: list[str]) -> tuple[workers.TwoEnds, list[Worker]]:
    """A scheduler of two workers that has dealt out its first units."""
    option = SimpleNamespace(loadscopereorder=True, debug=False)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: {"tx": ["popen"] * 2}[name])
    scheduler = workers.TwoEnds(config, Producer("scheduler", enabled=False))
    both = [Worker("gw0"), Worker("gw1")]
    for worker in both:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, node_ids)
    scheduler.schedule()
    return scheduler, both


def in_order(node_ids: list[str]) -> list[str]:
    items: list[Any] = [SimpleNamespace(nodeid=node_id) for node_id in node_ids]
    workers.put_jobs_first(items)
    return [item.nodeid for item in items]


def test_launches_come_first_and_files_stay_together() -> None:
    units = [workers.unit(node_id) for node_id in in_order(NODE_IDS)]
    assert units[:5] == ["4 ranks", "4 ranks", "2 ranks", "1 rank", "tests/test_faults.py"]
    assert units[5:] == ["tests/test_pages.py", "tests/test_pages.py", "tests/test_types.py"]


def test_each_rank_test_is_in_the_unit_of_its_launch(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if is_rank_test(item):
            assert workers.unit(item.nodeid).partition(" ")[0] == str(world_size(item))


def test_workers_meet_from_both_ends_and_every_test_is_dealt_out_once() -> None:
    node_ids = in_order([*NODE_IDS, *(f"tests/test_{name}.py::test_{idx}" for name in "xyz" for idx in range(5))])
    scheduler, (first, second) = make_scheduler(node_ids)
    assert workers.unit(node_ids[first.given[0]]) == "4 ranks"
    assert workers.unit(node_ids[second.given[0]]) == "tests/test_z.py"
    done = [0, 0]
    while any(len(worker.given) > count for worker, count in zip((first, second), done, strict=True)):
        for idx, worker in enumerate((first, second)):
            if len(worker.given) > done[idx]:
                done[idx] += 1
                scheduler.mark_test_complete(worker, worker.given[done[idx] - 1])
    assert sorted(first.given + second.given) == list(range(len(node_ids)))
    assert scheduler.tests_finished and first.given and second.given
    units = [{workers.unit(node_ids[idx]) for idx in worker.given} for worker in (first, second)]
    assert not units[0] & units[1]


def test_files_that_start_jobs_are_there() -> None:
    assert [file for file in workers.FILES_WITH_JOBS if not (ROOT / file).is_file()] == []


@pytest.fixture(scope="module")
def dealt(tmp_path_factory: pytest.TempPathFactory) -> Session:
    selected = ["-n", "1", "-k", "2 and (passes or skips_on_all)", str(SAMPLES)]
    return run_pytest(tmp_path_factory.mktemp("dealt"), *selected, CI="true")


def test_outcomes_come_back_from_the_workers(dealt: Session) -> None:
    assert dealt.returncode == 0
    assert dealt.outcomes == {
        "test_passes[2 ranks]": "passed",
        "test_skips_on_all[2 ranks]": "skipped",
        "test_passes_after_the_others[2 ranks-0]": "passed",
        "test_passes_after_the_others[2 ranks-63]": "passed",
    }


def test_workers_tell_seconds_and_reasons(dealt: Session) -> None:
    summary = dealt.output.partition("seconds a file")[2]
    assert "launches of rank tests" in summary
    assert "1  host: nobody wants to" in dealt.output


def test_a_skip_on_a_worker_fails_in_ci(tmp_path: Path) -> None:
    select = ["-n", "1", f"{SAMPLES}::test_passes[2 ranks]"]
    done = run_pytest(tmp_path, *select, CI="true", DIST_INFER_TESTS_MPIRUN="/nowhere/mpirun")
    assert (done.returncode, done.outcomes) == (1, {"test_passes[2 ranks]": "error"})
