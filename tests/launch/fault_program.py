"""A tiny job for the fault tables: runs to a phase, says READY there, and meets its fault on rank 1.

Arguments: fault, phase. The loop of the phase "step" keeps to the protocol's shape: news, record, table, and a stop
that is asked of any rank is everybody's at the next table.
"""

import os
import resource
import signal
import sys
import threading
import time
from typing import Any, NoReturn

if sys.argv[2] == "before MPI" and "1" in map(os.environ.get, ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")):
    print("READY before MPI", flush=True)
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.exit(0)  # before the imports below, which take longer than the launcher's notice of it

import numpy as np
import torch

from dist_infer.errors import ExitCode, PeerFailedError
from dist_infer.launch import world as world_module
from dist_infer.launch.pool import Pool, run_pool
from dist_infer.launch.world import World, run_world

FAULT, PHASE = sys.argv[1:]
FOR_EVER_S = 1000.0


class UnpicklableError(Exception):
    """Neither its text nor its pickle can be had."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.lock = lock

    def __str__(self) -> str:
        raise RuntimeError("no text for you")


def raise_fault() -> None:
    raise ValueError("broken on purpose")


def exhaust_memory() -> None:
    """By the limit of the process, so that the machine keeps its memory."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    kept = []
    while True:
        kept.append(bytearray(16 << 20))


def crash() -> None:
    """Without a core file, which would lie in the folder where the tests were started."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def raise_unpicklable() -> None:
    raise UnpicklableError(threading.Lock())


def fill_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"a record")


FAULTS = {
    "exception": raise_fault,
    "exit": lambda: sys.exit(0),
    "hard exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": exhaust_memory,
    "unpicklable": raise_unpicklable,
    "disk full": fill_disk,
}


def meet_fault(rank: int) -> None:
    """Rank 1 meets the fault, where it is one that a rank has by itself."""
    if rank == 1:
        print(f"READY {PHASE}", flush=True)
        FAULTS.get(FAULT, lambda: None)()


def stay() -> NoReturn:
    """Where the fault is somebody else's."""
    while True:
        time.sleep(FOR_EVER_S)


def start_up() -> None:
    """Set the trap inside World.open, after MPI_Init; the others wait in the vote of the start."""

    def trapped(requested: str, local_rank: int) -> torch.device:
        meet_fault(local_rank)
        if local_rank == 1:
            stay()
        return torch.device("cpu")

    world_module.choose_device = trapped  # type: ignore[attr-defined]


def load(world: World) -> int:
    """The others have loaded and wait in the vote, rank 1 has not."""
    if world.rank == 1:
        with world.watchdog.long_task("load"):
            meet_fault(world.rank)
            stay()
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
            meet_fault(world.rank)
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


def idle(world: World) -> int:
    """The pool sleeps: rank 0 waits for input or a stop, the others for news. Rank 1 meets its fault in its sleep."""
    control, at = world.control, time.monotonic() + 0.5
    met: list[bool] = []

    def look() -> None:
        if not met and time.monotonic() > at:
            met.append(True)
            meet_fault(world.rank)
        world.signals.stop_requested()

    with world.watchdog.sleeping():
        if world.rank == 0:
            control.wait(world.signals.stop_requested, idle=True)
            control.broadcast_news(b"{}")
        else:
            control.receive_news(look, idle=True)
    return ExitCode.DRAINED


def shutdown(world: World) -> int:
    """All have said farewell; rank 1 meets its fault before MPI_Finalize."""
    world.farewell(ExitCode.DONE)
    meet_fault(world.rank)
    if world.rank == 1:
        stay()
    return ExitCode.DONE


def blocked_peer(world: World) -> int:
    """The other ranks sit in a call that never looks at the alarm."""
    world.watchdog.step(1)
    meet_fault(world.rank)
    stay()


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
    if world.rank == 1 and FAULT in FAULTS:
        at = time.monotonic() + 0.5

        def trapped_sent() -> bool:
            if time.monotonic() > at:
                meet_fault(world.rank)
            return sent()

        assert world.task_channel is not None
        mail = world.task_channel[1]
        sent = mail.sent
        mail.sent = trapped_sent  # type: ignore[method-assign]
    elif world.rank == 1:
        print(f"READY {PHASE}", flush=True)


PHASES = {
    "before MPI": steps,
    "start-up": steps,
    "load": load,
    "step": steps,
    "idle": idle,
    "shutdown": shutdown,
    "blocked": blocked_peer,
    "pool": waiting_pool,
}

if __name__ == "__main__":
    if PHASE == "start-up":
        start_up()
    sys.exit(run_world(PHASES[PHASE], device="cpu", step_timeout_s=3.0 if FAULT == "stall" else 300.0))
