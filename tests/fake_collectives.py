"""A tensor-parallel group of threads in one process: fast, and without MPI or torch.distributed."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import Mesh, split_sizes
from dist_infer.comm.reference import collectives as reference

T = TypeVar("T")


class _Table:
    """Where the ranks of a group lay their tensors."""

    def __init__(self, size: int, timeout_s: float = 120) -> None:
        self.tensors: list[Tensor | None] = [None] * size
        self.barrier = Barrier(size, timeout=timeout_s)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Threads don't wait for each other's streams: on a GPU all tensors are there and copied before any goes on."""
        _finish(x)
        self.tensors[rank] = x
        self.barrier.wait()
        seen = [tensor.clone() if tensor.is_cuda else tensor for tensor in self.tensors if tensor is not None]
        _finish(x)
        self.barrier.wait()
        return seen


def _finish(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()


class FakeCollectives:
    """`Collectives` by the reference on lists; every rank is a thread."""

    capturable = False

    def __init__(self, table: _Table, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.wire_bytes: dict[str, int] = {}
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._table = table

    def all_reduce(self, x: Tensor) -> Tensor:
        return reference.all_reduce(self._exchange("all_reduce", x))[self.rank]

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        inputs = self._exchange("all_gather", x)
        assert sizes is None or [len(part) for part in inputs] == list(sizes)
        return reference.all_gather(inputs)[self.rank]

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        inputs = self._exchange("reduce_scatter", x)
        return reference.reduce_scatter(inputs, sizes or split_sizes(len(x), self.size))[self.rank]

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return reference.broadcast(self._exchange("broadcast", x), root)[self.rank]

    def all_to_all(self, x: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Tensor:
        table = self._exchange("all_to_all sizes", torch.tensor(list(send_sizes)))
        sizes = [row.tolist() for row in table]
        assert [row[self.rank] for row in sizes] == list(recv_sizes)
        return reference.all_to_all(self._exchange("all_to_all", x), sizes)[self.rank]

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        assert x.is_contiguous()
        self.calls.append((name, tuple(x.shape)))
        return self._table.exchange(self.rank, x)


def run_group(size: int, main: Callable[[Collectives], T]) -> list[T]:
    """main(collectives) on `size` threads; the values by rank, or the first rank's own error."""
    table = _Table(size)

    def run(rank: int) -> T:
        try:
            return main(FakeCollectives(table, rank, size))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def run_mesh(
    world: int,
    main: Callable[[Mesh, Collectives, Collectives], T],
    *,
    dp: int = 1,
    ep: int | None = None,
    timeout_s: float = 120,
) -> list[T]:
    """main(mesh, world, tp) on a thread a rank; the values by rank, or the first rank's own error."""
    meshes = [Mesh.create(world=world, rank=rank, dp=dp, ep=ep) for rank in range(world)]
    world_table, tp_tables = _Table(world, timeout_s), [_Table(meshes[0].tp, timeout_s) for _ in range(dp)]

    def run(mesh: Mesh) -> T:
        try:
            tp = FakeCollectives(tp_tables[mesh.dp_rank], mesh.tp_rank, mesh.tp)
            return main(mesh, FakeCollectives(world_table, mesh.rank, world), tp)
        except BaseException:
            for table in (world_table, *tp_tables):
                table.barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(run, mesh) for mesh in meshes]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
