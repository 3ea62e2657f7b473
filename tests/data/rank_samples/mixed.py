"""Rank tests that end in every way: tests/test_rank_parent.py runs this file and reads what pytest says about it."""

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it brings torch, which the process that only launches ranks does without
    from dist_infer.launch.world import World


@pytest.mark.ranks(1, 2)
def test_passes(world: "World") -> None:
    assert world.size in (1, 2)


@pytest.mark.ranks(2)
def test_fails_on_rank_1(world: "World") -> None:
    assert world.rank != 1, "the planted failure"
    time.sleep(20)


@pytest.mark.ranks(2, timeout=2)
def test_hangs_on_rank_0(world: "World") -> None:
    while world.rank == 0:
        time.sleep(1)


@pytest.mark.ranks(2)
def test_is_killed_on_rank_1(world: "World") -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)


@pytest.mark.ranks(2)
def test_skips_on_rank_1_only(world: "World") -> None:
    if world.rank == 1:
        pytest.skip("host: rank 1 does not want to")


@pytest.mark.ranks(2)
def test_skips_on_all(world: "World") -> None:
    pytest.skip("host: nobody wants to")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [0, 63])
def test_passes_after_the_others(world: "World", value: int) -> None:
    assert value in (0, 63)
