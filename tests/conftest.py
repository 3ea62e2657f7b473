"""Marks and policy of the test suite: rank tests, GPU tests, skips in CI, seconds a file.

A rank test is marked `@pytest.mark.ranks(1, 2, 4)` and takes the fixture `world`. Plain `pytest` launches it under
mpirun (rank_parent.py); on a rank it runs as itself (rank_child.py). By hand, with or without pytest-mpi's option:
`mpirun -n 2 python -m mpi4py -m pytest -x --with-mpi tests/comm`. `pytest -n 2` deals the tests to two workers
(workers.py), each of which is such a parent.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bare_checkout import make_importable

make_importable(Path(__file__).parent.parent)

from tests.rank_child import FOLDER_VARIABLE, RankRecorder, RankWorld, launched_size  # noqa: E402 - needs dist_infer
from tests.rank_parent import RankLauncher  # noqa: E402
from tests.suite_report import SuiteReport  # noqa: E402

if TYPE_CHECKING:
    from dist_infer.launch.world import World

_ROOT = Path(__file__).parent.parent


# Threads that spin while ranks wait for a core make everything ten times slower; torch reads these when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    _make_importable("benchmarks")
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        config.pluginmanager.register(RankRecorder(Path(folder), config), "rank_recorder")
    if folder is not None or launched_size() is not None:
        config.pluginmanager.register(RankWorld(), "rank_world")
        return
    config.pluginmanager.register(SuiteReport(config, in_ci=os.environ.get("CI") == "true"), "suite_report")
    if getattr(config.option, "numprocesses", None):
        return  # this process only hands tests out to workers
    config.pluginmanager.register(RankLauncher(config), "rank_launcher")
    if "TRITON_INTERPRET" not in os.environ:  # else somebody has decided, and torch can wait
        from tests.kernels import triton_interpreter

        triton_interpreter.switch_on()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.workers import TwoEnds  # needs pytest-xdist

    return TwoEnds(config, log)


def _make_importable(package: str) -> None:
    """A folder beside tests, without the root on sys.path, where comm, kernels and launch would have bare names."""
    spec = importlib.machinery.PathFinder.find_spec(package, [str(_ROOT)])
    if spec is not None and package not in sys.modules:
        sys.modules[package] = importlib.util.module_from_spec(spec)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if "world" not in metafunc.fixturenames or not marker.args:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: ranks(1, 2, ...) needs sizes, and a test with the fixture world"
        )
    here = _sizes_here()
    sizes = [size for size in marker.args if here is None or size == here]
    ids = [f"{size} rank{'s' if size > 1 else ''}" for size in sizes]
    metafunc.parametrize("world", sizes, ids=ids, indirect=True)


def _sizes_here() -> int | None:
    """None in the parent, which launches all sizes."""
    return launched_size() or (1 if FOLDER_VARIABLE in os.environ else None)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> "World":
    """This rank's World, open before the first test; one for all tests of a launch."""
    plugin = request.config.pluginmanager.get_plugin("rank_world")
    if plugin is None or plugin.world is None:
        raise pytest.UsageError(f"{request.node.nodeid}: a test with the fixture world needs the mark ranks(...)")
    world: World = plugin.world
    return world


def pytest_itemcollected(item: pytest.Item) -> None:
    by_hand = any(item.config.getoption(option, default=False) for option in ("--with-mpi", "--only-mpi"))
    if by_hand and item.get_closest_marker("ranks"):
        item.add_marker(pytest.mark.mpi)  # what pytest-mpi's options look for


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: torch finds no CUDA device"))
    # pytest sorts by the parameter `world` across files; keep each file together, sizes ascending in it
    files = {path: idx for idx, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: files[item.path])
    if hasattr(config, "workerinput"):
        from tests.workers import put_jobs_first  # needs pytest-xdist

        put_jobs_first(items)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
