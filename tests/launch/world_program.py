"""A tiny job for test_world.py: ends in the way that its argument names."""

import sys

import numpy as np

from dist_infer.errors import ExitCode, UsageError
from dist_infer.launch.world import World, run_world


def voted(world: World) -> int:
    """Rank 1 can't use its options."""
    world.vote("options", UsageError("--tp 3 does not divide 2 ranks") if world.rank == 1 else None)
    return ExitCode.DONE


def leftovers(world: World) -> int:
    """Outputs and wake-ups that nobody takes: the farewell does, or Finalize would hang. The worst code is all's."""
    if world.rank == 1:
        world.control.send_outputs(1, b"x" * 1_000_000)
        world.control.send_outputs(2, b"")
        world.control.wake_root()
    return ExitCode.DRAINED if world.rank == 1 else ExitCode.FAILED_REQUESTS


def no_farewell() -> None:
    """A plain program without `with`, which ends on rank 1."""
    world = World.open(device="cpu")
    if world.rank == 0:
        world.control.post_record(np.zeros(1, np.int64))
        world.control.wait_table()


if __name__ == "__main__":
    if sys.argv[1] == "no farewell":
        no_farewell()
    else:
        sys.exit(run_world({"voted": voted, "leftovers": leftovers}[sys.argv[1]], device="cpu"))
