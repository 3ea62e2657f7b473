"""A stage, in a world of one rank."""

import pytest

from dist_infer.cli.stage import stage
from dist_infer.errors import DistInferError, UsageError
from dist_infer.launch.world import World


def fail() -> None:
    raise UsageError("the fix")


def test_a_stage_gives_what_was_built_or_a_voted_error() -> None:
    with World.open(device="cpu", env={}) as world:
        assert stage(world, "count", lambda: 3) == 3
        with pytest.raises(DistInferError, match="the fix"):
            stage(world, "count", fail)
