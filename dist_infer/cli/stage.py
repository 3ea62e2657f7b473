"""A stage of what all ranks do together: it ends with a vote."""

from collections.abc import Callable
from typing import TypeVar

from dist_infer.launch.world import World

T = TypeVar("T")


def stage(world: World, name: str, build: Callable[[], T]) -> T:
    """What `build` makes, once it has gone well on all ranks.

    Ranks: collective over the world. Errors: VotedError on every rank, naming those that failed and why.
    """
    result: T | None = None
    failed: Exception | None = None
    try:
        with world.watchdog.long_task(name):
            result = build()
    except Exception as error:  # whatever it is, the others must learn of it
        failed = error
    world.vote(name, failed)
    return result  # type: ignore[return-value]  # the vote raises where there is none
