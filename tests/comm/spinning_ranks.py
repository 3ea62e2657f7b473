"""A job whose ranks wait for each other on the GPU: says READY, and then rank 1 meets the fault that is given."""

import os
import signal
import sys

import torch

from dist_infer.comm.all_reduce import FusedAllReduce
from dist_infer.comm.mesh import Mesh
from dist_infer.comm.strategy import Strategy
from dist_infer.errors import ExitCode
from dist_infer.kernels.dispatch import Target
from dist_infer.launch.world import World, run_world
from tests.comm.peer_ranks import opened_room


def main(world: World) -> ExitCode:
    """One sum of all ranks; for the next one rank 1 is missing."""
    group = world.communicators(Mesh.create(world=world.size, rank=world.rank)).world
    target = Target(device=world.device, dtype=torch.bfloat16)
    with opened_room(group, world, max_tokens=8) as room:
        reduce = FusedAllReduce(group, target, room=room, strategy=Strategy.ONE_SHOT)
        x = torch.ones(8, 7168, device=world.device).bfloat16()
        assert (reduce(x).total == world.size).all()
        print(f"READY {world.rank}", flush=True)
        if world.rank == 1:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("broken on purpose")
        reduce(x)
        torch.cuda.synchronize()
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(run_world(main, device="cuda", share_gpu=True))
