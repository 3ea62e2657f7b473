"""A pytest plugin for tests of your own that run on the ranks of an MPI launch: the fixtures `world` and `on_pool`.

In your conftest.py: `pytest_plugins = ["dist_infer.launch.pytest_world"]`. Then, with pytest-mpi's marks and option:
`mpirun -n 2 python -m mpi4py -m pytest -x --with-mpi`. Without mpirun the same tests have a world of one.

A rank on which a test failed never says farewell: its peers may be in a collective that it will not enter. It ends the
whole launch instead, and the exit code is pytest's.
"""

from collections.abc import Callable
from typing import TypeAlias

import pytest

from dist_infer.launch.pool import Pool, run_pool
from dist_infer.launch.world import World

OnPool: TypeAlias = Callable[[Callable[[Pool], object]], None]

_WORLD = pytest.StashKey[World]()
_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> World:
    """This rank's world, one for all tests of the session. On the CPU; override it for another device."""
    opened = World.open(device="cpu")
    request.config.stash[_WORLD] = opened
    return opened


@pytest.fixture
def on_pool(world: World) -> OnPool:
    """Runs `main(pool)` on rank 0, while the other ranks do what it asks them for."""

    def run(main: Callable[[Pool], object]) -> None:
        run_pool(world, main)

    return run


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember how it went."""
    session.config.stash[_FAILED] = exitstatus != pytest.ExitCode.OK


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave together. Not before: pytest-mpi's summary still asks MPI for rank and size."""
    opened = config.stash.get(_WORLD, None)
    if opened is not None and not config.stash.get(_FAILED, True):
        opened.close()
