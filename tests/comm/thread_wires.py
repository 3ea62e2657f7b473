"""Wires between ranks that are threads of one process."""

import mmap
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from dist_infer.comm.shm_wire import MAX_SLOT_BYTES, ShmWire, group_bytes
from dist_infer.comm.wire import GlooWire, Wire
from tests.comm.thread_ranks import run_ranks


def on_gloo(device: str, size: int, main: Callable[[Wire], None], timeout_s: float = 30.0) -> None:
    """Runs main on each rank, over gloo."""
    store = HashStore()

    def run(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupGloo(store, rank, size, options)
        main(GlooWire(group, torch.device(device)))

    run_ranks(size, lambda rank, _: run(rank))


def shm_wires(
    size: int,
    slot_bytes: int = MAX_SLOT_BYTES,
    timeout_s: float = 30.0,
    on_wait: Callable[[], None] = lambda: None,
) -> list[ShmWire]:
    """The wires of all ranks through one piece of memory."""
    memory = memoryview(mmap.mmap(-1, group_bytes(size, slot_bytes)))
    return [
        ShmWire(memory, rank=rank, size=size, slot_bytes=slot_bytes, timeout_s=timeout_s, on_wait=on_wait)
        for rank in range(size)
    ]


def on_shm(wires: list[ShmWire], main: Callable[[ShmWire], None]) -> None:
    """Runs main on each rank, over shared memory."""
    run_ranks(len(wires), lambda rank, _: main(wires[rank]))
