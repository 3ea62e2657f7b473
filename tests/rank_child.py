"""The rank's side of the rank tests: opens the world, and tells the parent line by line what this rank is doing.

Lines of JSON go into one file a rank, so that a rank that dies or is killed leaves behind what it had done. A rank on
which a test fails leaves at once: its peers may be waiting for it in a collective, and the launcher ends them.
"""

import faulthandler
import gc
import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dist_infer.launch.world import World

FOLDER_VARIABLE = "DIST_INFER_RANK_TESTS"
DEFAULT_TIMEOUT_S = 60.0
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_POLL_S = 0.002
_LAST_WORDS_S = 0.5  # time for peers that fail too to say so before the launcher ends them


def launched_size() -> int | None:
    """Ranks of the MPI launch that this pytest is in, or None outside any."""
    return next((int(os.environ[name]) for name in _SIZE_VARIABLES if name in os.environ), None)


def launched_rank() -> int:
    """This process's rank in the MPI launch; 0 outside any."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def timeout_of(item: pytest.Item) -> float:
    """Seconds that one rank test may take on its slowest rank."""
    marker = item.get_closest_marker("ranks")
    return float(marker.kwargs.get("timeout", DEFAULT_TIMEOUT_S)) if marker else DEFAULT_TIMEOUT_S


class RankWorld:
    """pytest plugin on each rank: the one World of the process, open from collection to the end of a good session."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.all_passed = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if any(item.get_closest_marker("ranks") for item in session.items):
            from dist_infer.launch.world import World  # brings torch, which the parent and most selections do without

            on_gpu = any(item.get_closest_marker("gpu") for item in session.items)
            self.world = World.open(device="cuda" if on_gpu else "cpu", share_gpu=True)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.all_passed = exitstatus == pytest.ExitCode.OK

    def pytest_unconfigure(self) -> None:
        """Not before: pytest-mpi's summary still asks MPI for rank and size."""
        if self.world is not None and self.all_passed:
            self.world.close()


class RankRecorder:
    """pytest plugin on each rank: runs the tests that the parent wrote down, in its order, and records each report."""

    def __init__(self, folder: Path, config: pytest.Config) -> None:
        self.config = config
        self.rank = launched_rank()
        self.size = launched_size() or 1
        self.node_ids: list[str] = json.loads((folder / "tests.json").read_text())
        self.lines = open(folder / f"rank{self.rank}.jsonl", "a", buffering=1)  # noqa: SIM115 - open as long as the process
        self.done_files = [folder / f"rank{rank}.done" for rank in range(self.size)]  # one byte a finished test
        self.done = os.open(self.done_files[self.rank], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.num_done = 0
        self.stacks = open(folder / f"rank{self.rank}.stacks", "w")  # noqa: SIM115

    def write(self, **fields: Any) -> None:
        """One line; it is in the file when this returns."""
        self.lines.write(json.dumps({"time": time.time(), **fields}) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        missing = [node_id for node_id in self.node_ids if node_id not in by_id]
        if missing:
            raise pytest.UsageError(f"rank {self.rank} does not find {missing}: does collection depend on the machine?")
        items[:] = [by_id[node_id] for node_id in self.node_ids]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        timeout_s = timeout_of(item)
        self.write(event="start", node_id=item.nodeid, timeout_s=timeout_s)
        faulthandler.dump_traceback_later(timeout_s, file=self.stacks)
        result = yield
        faulthandler.cancel_dump_traceback_later()
        self.write(event="finish", node_id=item.nodeid)
        self.wait_for_peers()
        return result

    def wait_for_peers(self) -> None:
        """No rank starts a test before all have finished the one before: so a failure is blamed on the right test."""
        os.write(self.done, b".")
        self.num_done += 1
        while not all(_size(path) >= self.num_done for path in self.done_files):
            time.sleep(_POLL_S)

    def pytest_unconfigure(self) -> None:
        """Leave at once: pytest and the interpreter would walk all objects of torch, again and again, for seconds."""
        gc.freeze()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.write(event="report", node_id=report.nodeid, report=json.loads(json.dumps(data, default=str)))
        if report.failed and self.size > 1:
            time.sleep(_LAST_WORDS_S)
            os._exit(1)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
