"""A tiny job for the fault table: runs to a phase, says READY there, and meets its fault on rank 1.

Arguments: fault, phase. The loop of the phase "step" keeps to the protocol's shape: news, record, table, and a stop
that is asked of any rank is everybody's at the next table.
"""

import os
import signal
import sys
import time

if sys.argv[2] == "before MPI" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    print("READY before MPI", flush=True)
    sys.exit(0)  # before the imports below, which take longer than the launcher's notice of it

import numpy as np

from dist_infer.errors import ExitCode, PeerFailedError
from dist_infer.launch.pool import Pool, run_pool
from dist_infer.launch.world import World, run_world

FAULT, PHASE = sys.argv[1:]
FOR_EVER_S = 1000.0


def meet_fault(world: World) -> None:
    """Rank 1 meets the fault, where it is one that a rank has by itself."""
    if world.rank != 1:
        return
    print(f"READY {PHASE}", flush=True)
    if FAULT == "exception":
        raise ValueError("broken on purpose")
    if FAULT == "exit":
        sys.exit(0)
    if FAULT == "hard exit":
        os._exit(0)
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def start_up(world: World) -> int:
    """Rank 0 has loaded and waits in the vote, rank 1 has not."""
    meet_fault(world)
    if world.rank == 1:
        with world.watchdog.long_task("load"):
            time.sleep(FOR_EVER_S)
    world.vote("load", None)
    return ExitCode.DONE


def steps(world: World) -> int:
    """Endless steps."""
    control, step, stop = world.control, 0, False
    while not stop:
        step += 1
        world.watchdog.step(step)
        if world.rank == 0:
            control.broadcast_news(b"{}")
        else:
            control.receive_news(lambda: None, idle=False)
        if step == 20:
            meet_fault(world)
        try:
            control.post_record(np.array([step, world.signals.stop_requested()]))
            table = control.wait_table()
        except PeerFailedError:
            time.sleep(0.5)  # a peer that aborts as soon as it can would cut this short
            print(f"rank {world.rank} has answered what was open", flush=True)
            raise
        stop = bool(table[:, 1].any())
        time.sleep(1e-3)
    if world.rank == 0:
        print(
            f"dist-infer: drained after step {step}: ranks {np.flatnonzero(table[:, 1])} were asked to stop", flush=True
        )
    return ExitCode.DRAINED


def blocked_peer(world: World) -> int:
    """The other ranks sit in a call that never looks at the alarm."""
    world.watchdog.step(1)
    meet_fault(world)
    time.sleep(FOR_EVER_S)
    return ExitCode.DONE


def waiting_pool(world: World) -> int:
    """A task was done, the next one never comes: rank 0's program is busy elsewhere."""

    def main(pool: Pool) -> None:
        pool.run(meet_late)
        pool.run(lambda world: world.rank)
        world.control.wait(lambda: False, idle=True)

    run_pool(world, main)
    return ExitCode.DONE


def meet_late(world: World) -> None:
    """Leave a trap that goes off while rank 1 waits for the next task."""
    if world.rank == 1 and FAULT in ("exception", "exit", "hard exit", "kill"):
        at = time.monotonic() + 0.5

        def trapped_sent() -> bool:
            if time.monotonic() > at:
                meet_fault(world)
            return sent()

        assert world.task_channel is not None
        mail = world.task_channel[1]
        sent = mail.sent
        mail.sent = trapped_sent  # type: ignore[method-assign]
    elif world.rank == 1:
        print(f"READY {PHASE}", flush=True)


if __name__ == "__main__":
    phases = {"start-up": start_up, "step": steps, "blocked": blocked_peer, "pool": waiting_pool, "before MPI": steps}
    step_timeout_s = 3.0 if FAULT == "stall" else 300.0
    sys.exit(run_world(phases[PHASE], device="cpu", step_timeout_s=step_timeout_s, start_timeout_s=8.0))
