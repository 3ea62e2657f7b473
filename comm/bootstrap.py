"""Opens the store and the process groups: the door to torch.distributed.

The store listens on one address only, on a port that the kernel chooses and that is never given back before it is used,
so jobs that start at the same moment don't race for it. Its address travels by the caller's channel (MPI), not by the
environment.

Gloo groups are made directly, not through init_process_group: that has no way to say which interface gloo binds, and
takes the one that the own host name resolves to, which is loopback on many Linux distributions. Each group is its
members' business alone: no other rank takes part in making it. NCCL groups are torch's registered ones, because peer
memory is found through their names. The groups of CPU ranks on one host share one piece of memory, cut here by rules
that all ranks follow alike.
"""

import json
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from dist_infer.comm.collectives import Collectives, SingleCollectives, TorchCollectives
from dist_infer.comm.mesh import Axis, Mesh
from dist_infer.comm.shm_segment import NoSharedMemoryError, open_segment
from dist_infer.comm.shm_wire import ShmWire, group_bytes, slot_bytes_of
from dist_infer.comm.wire import GlooWire, NcclWire, Wire
from dist_infer.errors import DistInferError

Backend = Literal["gloo", "nccl", "shm"]

_logger = logging.getLogger(__name__)
_AXES: tuple[Axis, ...] = ("world", "tp", "dp", "ep")
_BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicators:
    """The collectives of each axis. Axes that are the whole world share one object."""

    world: Collectives
    tp: Collectives
    dp: Collectives
    ep: Collectives


def open_store(
    *, rank: int, size: int, host: str, announce: Callable[[bytes | None], bytes], timeout_s: float = 60.0
) -> TCPStore:
    """The store of the job, served by rank 0 on `host` and a free port.

    `host` is the name or address of rank 0's interface as all ranks reach it; only rank 0 reads it. `announce`
    broadcasts rank 0's bytes to all: rank 0 passes them, the others None.

    Ranks: collective over the world.
    Errors: DistInferError on every rank if rank 0 can't listen; on a rank that can't reach rank 0.
    """
    if rank != 0:
        record = json.loads(announce(None))
        if "error" in record:
            raise DistInferError(record["error"])
        return connect_store(record["host"], record["port"], size=size, timeout_s=timeout_s)
    try:
        store = _serve_store(size, host, timeout_s)
    except (OSError, RuntimeError) as error:
        message = (
            f"rank 0 can't open the job's store on {host!r}: {error}. Name an address of this host that all ranks reach"
        )
        announce(json.dumps({"error": message}).encode())
        raise DistInferError(message) from error
    announce(json.dumps({"host": store.host, "port": store.port}).encode())
    return store


def connect_store(host: str, port: int, *, size: int, timeout_s: float) -> TCPStore:
    """A connection of its own to a store that is served already, for another rank or another thread.

    Errors: DistInferError if it is not reached in time.
    """
    try:
        return TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise DistInferError(
            f"{socket.gethostname()} can't reach the job's store at {host} port {port} in {timeout_s:g} s: {error}"
        ) from error


def open_best_groups(
    *,
    mesh: Mesh,
    store: Store,
    device: torch.device,
    gpu_shared: bool,
    one_host: bool,
    timeout_s: float,
    on_wait: Callable[[], None],
) -> Communicators:
    """NCCL for GPUs with one rank each, shared memory for CPU ranks of one host, else gloo; the log says which and why.

    Ranks: collective over the world; `device.type`, `gpu_shared` and `one_host` are the same on all ranks.
    Errors: see open_process_groups.
    """

    def opened(backend: Backend, why: str, level: int = logging.INFO) -> Communicators:
        groups = open_process_groups(
            mesh=mesh, store=store, backend=backend, device=device, timeout_s=timeout_s, on_wait=on_wait
        )
        if mesh.rank == 0:
            _logger.log(level, "%d ranks exchange tensors by %s: %s", mesh.world, backend, why)
        return groups

    if device.type == "cuda":
        return opened("gloo", "ranks share a GPU") if gpu_shared else opened("nccl", "each rank has a GPU of its own")
    if not one_host:
        return opened("gloo", "CPU ranks on several hosts")
    try:
        return opened("shm", "CPU ranks on one host")
    except NoSharedMemoryError as error:  # on all ranks alike
        refused = str(error)
    return opened("gloo", f"slower than shared memory, but {refused}", logging.WARNING)


def open_process_groups(
    *,
    mesh: Mesh,
    store: Store,
    backend: Backend,
    device: torch.device,
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> Communicators:
    """The collectives of every axis of the mesh, by one backend.

    Several ranks on one GPU take gloo, which stages their tensors through host memory. `on_wait` is called in the long
    waits of shared memory and may raise.

    Ranks: collective over the world.
    Errors: ValueError for NCCL without a CUDA device and for shared memory with one; NoSharedMemoryError, the same on
        all ranks; DistInferError if the ranks don't meet in time.
    """
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"NCCL works between CUDA devices, not on {device}")
    if backend == "shm" and device.type != "cpu":
        raise ValueError(f"shared memory works between CPU ranks, not on {device}")
    # How often this rank has opened groups, equal on all ranks: it keeps a second set apart from the first.
    opened = store.add(f"comm/opened/{mesh.rank}", 1)
    groups_store = PrefixStore(f"comm/{opened}", store)
    timeout = timedelta(seconds=timeout_s)
    if backend == "nccl":
        open_wire = _nccl_opener(mesh, groups_store, device, timeout)
    elif backend == "shm":
        open_wire = _shm_opener(mesh, groups_store, timeout_s, on_wait)
    else:
        open_wire = _gloo_opener(mesh, groups_store, _own_address(store), device, timeout)
    opened_axes: dict[tuple[range, ...], Collectives] = {}
    for axis, partition in _distinct_partitions(mesh).items():
        if len(partition) == mesh.world:
            opened_axes[partition] = SingleCollectives()
            continue
        limit = _max_whole_bytes(backend, len(partition[0]))
        opened_axes[partition] = TorchCollectives(open_wire(axis), axis=axis, max_whole_bytes=limit)
    return Communicators(**{axis: opened_axes[tuple(mesh.partition(axis))] for axis in _AXES})


def _max_whole_bytes(backend: Backend, size: int) -> int:
    """Up to here benchmarks/bench_collectives.py finds the whole way of an all-reduce faster than the sliced one."""
    if backend == "shm":
        return 2 << 20 if size == 2 else 256 << 10
    return 512 << 10


def _distinct_partitions(mesh: Mesh) -> dict[Axis, tuple[range, ...]]:
    """The groups of each axis, without the axes that have the same groups as one before them."""
    partitions: dict[Axis, tuple[range, ...]] = {}
    for axis in _AXES:
        partition = tuple(mesh.partition(axis))
        if partition not in partitions.values():
            partitions[axis] = partition
    return partitions


def close_process_groups() -> None:
    """Ends the groups that torch keeps (NCCL's). Gloo's end with their Communicators."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve_store(size: int, host: str, timeout_s: float) -> TCPStore:
    """Listens on one address, unlike TCPStore's own socket, which listens on all."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(_BACKLOG)
        bound_host, port = listener.getsockname()[:2]
        return TCPStore(
            bound_host,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _own_address(store: Store) -> str:
    """The numeric address of the interface that leads to rank 0, whatever this host's name resolves to."""
    host, port = _endpoint(store)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses the route, sends nothing
        own: str = probe.getsockname()[0]
        return own


def _endpoint(store: Store) -> tuple[str, int]:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        raise ValueError(f"process groups need a TCPStore, not {type(store).__name__}")
    return store.host, store.port


def _gloo_opener(
    mesh: Mesh, store: Store, address: str, device: torch.device, timeout: timedelta
) -> Callable[[Axis], Wire]:
    def open_wire(axis: Axis) -> Wire:
        ranks = mesh.axis_ranks(axis)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        prefixed = PrefixStore(f"{axis}/{ranks.start}", store)
        try:
            group = dist.ProcessGroupGloo(prefixed, ranks.index(mesh.rank), len(ranks), options)
        except RuntimeError as error:
            raise DistInferError(
                f"rank {mesh.rank} (address {address}) did not meet ranks {list(ranks)} of axis {axis} by gloo"
                f" in {timeout.total_seconds():g} s: {error}"
            ) from error
        return GlooWire(group, device)

    return open_wire


def _shm_opener(mesh: Mesh, store: Store, timeout_s: float, on_wait: Callable[[], None]) -> Callable[[Axis], Wire]:
    """All groups of all axes lie in one segment, one after another."""
    starts: dict[tuple[Axis, range], int] = {}
    num_bytes = 0
    for axis, partition in _distinct_partitions(mesh).items():
        for ranks in partition:
            starts[axis, ranks] = num_bytes
            num_bytes += group_bytes(len(ranks), slot_bytes_of(len(ranks)))
    segment = open_segment(
        store=store, rank=mesh.rank, size=mesh.world, num_bytes=max(num_bytes, 1), timeout_s=timeout_s
    )

    def open_wire(axis: Axis) -> Wire:
        ranks = mesh.axis_ranks(axis)
        slot_bytes = slot_bytes_of(len(ranks))
        memory = memoryview(segment)[starts[axis, ranks] :][: group_bytes(len(ranks), slot_bytes)]
        return ShmWire(
            memory,
            rank=ranks.index(mesh.rank),
            size=len(ranks),
            slot_bytes=slot_bytes,
            timeout_s=timeout_s,
            on_wait=on_wait,
        )

    return open_wire


def _nccl_opener(mesh: Mesh, store: Store, device: torch.device, timeout: timedelta) -> Callable[[Axis], Wire]:
    try:
        if not dist.is_initialized():  # one world, whatever meshes are opened on it
            dist.init_process_group(
                "nccl", store=store, rank=mesh.rank, world_size=mesh.world, timeout=timeout, device_id=device
            )
    except RuntimeError as error:
        raise DistInferError(
            f"NCCL did not start on rank {mesh.rank}, {device}, in {timeout.total_seconds():g} s: {error}"
        ) from error

    def open_wire(axis: Axis) -> Wire:
        if axis == "world":
            return NcclWire(_world_group(), device)
        own = mesh.axis_ranks(axis)
        # Every rank makes all groups of the axis in one order, also those that it is not in: torch asks for that.
        groups = {
            ranks: dist.new_group(list(ranks), timeout=timeout, group_desc=axis) for ranks in mesh.partition(axis)
        }
        return NcclWire(groups[own], device)

    return open_wire


def _world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed has lost its world group")
    return world
