"""The command dist-infer, whose rank 1 leaves by os._exit(0) in the middle of the job, as a library may do it."""

import itertools
import os
import sys

from dist_infer.cli.main import main
from dist_infer.engine import Engine

LAST_STEP = 40

_steps = itertools.count()
_step = Engine.step


def step_or_vanish(engine: Engine) -> bool:
    if engine._mesh.rank == 1 and next(_steps) == LAST_STEP:
        os._exit(0)
    return _step(engine)


if __name__ == "__main__":
    Engine.step = step_or_vanish  # type: ignore[method-assign, assignment]
    sys.exit(main())
