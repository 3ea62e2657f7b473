"""Ranks as threads of one process: gloo needs no more than a store and a place in the group."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Announce = Callable[[bytes | None], bytes]


def run_ranks(size: int, main: Callable[[int, Announce], T], timeout_s: float = 60.0) -> list[T]:
    """main(rank, announce) on `size` threads; `announce` broadcasts the bytes of rank 0."""
    boxes: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(size)]

    def announce_as(rank: int) -> Announce:
        def announce(data: bytes | None) -> bytes:
            if rank == 0:
                assert data is not None
                for box in boxes:
                    box.put(data)
            return boxes[rank].get(timeout=timeout_s)

        return announce

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(main, rank, announce_as(rank)) for rank in range(size)]
        return [future.result(timeout_s) for future in futures]
