"""Store and process groups: who meets whom, on which address, and what is said when they don't."""

import json
import logging
import mmap
import re
import socket
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from dist_infer.comm import shm_segment
from dist_infer.comm.bootstrap import (
    Backend,
    Communicators,
    close_process_groups,
    connect_store,
    open_best_groups,
    open_process_groups,
    open_store,
)
from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import Axis, Mesh
from dist_infer.comm.shm_segment import NoSharedMemoryError
from dist_infer.comm.shm_wire import ShmWire
from dist_infer.comm.wire import GlooWire
from dist_infer.errors import DistInferError
from dist_infer.launch.world import World
from tests.comm.thread_ranks import Announce, run_ranks

CPU = torch.device("cpu")
AXES: tuple[Axis, ...] = ("world", "tp", "dp", "ep")


def _listening(port: int) -> set[str]:
    """Hexadecimal local addresses, as /proc writes them, that listen on a port."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, hex_port in ends if int(hex_port, 16) == port}


def test_store_reaches_all_and_listens_on_one_address() -> None:
    def main(rank: int, announce: Announce) -> tuple[TCPStore, set[str]]:
        store = open_store(rank=rank, size=3, host="localhost", announce=announce)
        store.set(f"from/{rank}", str(rank))
        assert [store.get(f"from/{other}") for other in range(3)] == [b"0", b"1", b"2"]
        return store, _listening(store.port)  # rank 0's store lives until all have looked

    for store, listening in run_ranks(3, main):
        assert store.port > 0
        # 127.0.0.1 in /proc's byte order, or ::1 where localhost is that
        assert listening in ({"0100007F"}, {"0" * 24 + "01000000"})


def test_stores_opened_at_once_take_different_ports() -> None:
    stores = run_ranks(
        8, lambda rank, _: open_store(rank=0, size=1, host="127.0.0.1", announce=lambda data: data or b"")
    )
    assert len({store.port for store in stores}) == 8


def test_every_rank_hears_that_rank_0_cannot_listen() -> None:
    def main(rank: int, announce: Announce) -> str:
        with pytest.raises(DistInferError) as caught:
            open_store(rank=rank, size=3, host="no-such-host.invalid", announce=announce)
        return str(caught.value)

    messages = run_ranks(3, main)
    assert len(set(messages)) == 1
    assert "no-such-host.invalid" in messages[0] and "address of this host" in messages[0]


def test_address_of_another_host_is_refused() -> None:
    announced: list[bytes] = []

    def announce(data: bytes | None) -> bytes:
        announced.append(data or b"")
        return announced[-1]

    with pytest.raises(DistInferError, match=r"192\.0\.2\.1"):  # a documentation address: nobody's
        open_store(rank=0, size=2, host="192.0.2.1", announce=announce)
    assert "192.0.2.1" in json.loads(announced[0])["error"]


def test_store_that_nobody_serves_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: every connection is refused
        port = taken.getsockname()[1]
        with pytest.raises(DistInferError, match=rf"127\.0\.0\.1 port {port} in 1 s"):
            connect_store("127.0.0.1", port, size=2, timeout_s=1.0)


def test_second_connection_to_the_same_store() -> None:
    store = open_store(rank=0, size=1, host="127.0.0.1", announce=lambda data: data or b"")
    second = connect_store(store.host, store.port, size=1, timeout_s=10.0)
    second.set("beat", "7")
    assert store.get("beat") == b"7"


def _alone() -> TCPStore:
    return open_store(rank=0, size=1, host="127.0.0.1", announce=lambda data: data or b"")


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_world_of_one_opens_nothing(backend: Backend) -> None:
    mesh = Mesh.create(world=1, rank=0)
    opened = open_process_groups(mesh=mesh, store=_alone(), backend=backend, device=CPU, timeout_s=5.0)
    assert isinstance(opened.world, SingleCollectives)
    assert opened.world is opened.tp is opened.dp is opened.ep
    close_process_groups()


def test_nccl_without_a_gpu_is_refused() -> None:
    mesh = Mesh.create(world=1, rank=0)
    with pytest.raises(ValueError, match="CUDA devices, not on cpu"):
        open_process_groups(mesh=mesh, store=_alone(), backend="nccl", device=CPU, timeout_s=5.0)


def test_shared_memory_between_gpus_is_refused() -> None:
    mesh = Mesh.create(world=1, rank=0)
    with pytest.raises(ValueError, match="CPU ranks, not on cuda:0"):
        open_process_groups(mesh=mesh, store=_alone(), backend="shm", device=torch.device("cuda", 0), timeout_s=5.0)


def test_store_without_an_address_is_refused() -> None:
    mesh = Mesh.create(world=2, rank=0)
    with pytest.raises(ValueError, match="TCPStore, not HashStore"):
        open_process_groups(mesh=mesh, store=HashStore(), backend="gloo", device=CPU, timeout_s=5.0)


def test_absent_rank_is_an_error_in_time() -> None:
    def main(rank: int, announce: Announce) -> str:
        store = open_store(rank=rank, size=3, host="127.0.0.1", announce=announce)
        if rank == 2:
            return ""
        mesh = Mesh.create(world=3, rank=rank)
        with pytest.raises(DistInferError) as caught:
            open_process_groups(mesh=mesh, store=store, backend="gloo", device=CPU, timeout_s=2.0)
        return str(caught.value)

    messages = run_ranks(3, main)
    for rank in (0, 1):
        assert re.search(
            rf"rank {rank} \(address 127\.0\.0\.1\) did not meet ranks \[0, 1, 2\] of axis world", messages[rank]
        )


def _best(world: World, *, one_host: bool) -> Communicators:
    return open_best_groups(
        mesh=Mesh.create(world=world.size, rank=world.rank),
        store=world.store,
        device=CPU,
        gpu_shared=False,
        one_host=one_host,
        timeout_s=30.0,
        on_wait=lambda: None,
    )


def _no_space(path: Path, num_bytes: int) -> mmap.mmap:
    raise NoSharedMemoryError("/dev/shm is full")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("one_host", "refusing", "kind", "said"),
    [
        (True, None, ShmWire, "2 ranks exchange tensors by shm: CPU ranks on one host"),
        (False, None, GlooWire, "2 ranks exchange tensors by gloo: CPU ranks on several hosts"),
        (True, 0, GlooWire, "by gloo: slower than shared memory, but /dev/shm is full"),
        (True, 1, GlooWire, "by gloo: slower than shared memory, but /dev/shm is full"),
    ],
    ids=["one host", "several hosts", "rank 0 gets none", "rank 1 gets none"],
)
def test_all_ranks_take_one_wire_and_rank_0_says_why(
    world: World,
    one_host: bool,
    refusing: int | None,
    kind: type,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if refusing == world.rank:
        monkeypatch.setattr(shm_segment, "_attach" if refusing else "_create", _no_space)
    with caplog.at_level(logging.INFO, "dist_infer"):
        group = _best(world, one_host=one_host).world
    assert type(group.wire) is kind  # type: ignore[attr-defined]
    assert group.all_gather(torch.tensor([world.rank])).tolist() == [0, 1]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (world.rank == 0) and all(said in line for line in lines)
    assert [record.levelname for record in caplog.records] in ([], ["INFO" if refusing is None else "WARNING"])


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_axes_connect_the_ranks_of_the_mesh(world: World, backend: Backend) -> None:
    options = [{"dp": 1}, {"dp": world.size}] + [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 1}] * (world.size == 4)
    kept = []  # a group that is closed while another rank is still in it would be an error there
    for choice in options:
        mesh = Mesh.create(world=world.size, rank=world.rank, **choice)
        opened = open_process_groups(mesh=mesh, store=world.store, backend=backend, device=CPU, timeout_s=30.0)
        kept.append(opened)
        for axis in AXES:
            group = getattr(opened, axis)
            ranks = mesh.axis_ranks(axis)
            assert (group.rank, group.size) == (ranks.index(mesh.rank), len(ranks))
            assert group.all_gather(torch.tensor([mesh.rank])).tolist() == list(ranks)
            assert (group is opened.world) == (len(ranks) == world.size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_second_set_of_groups_is_apart_from_the_first(world: World, backend: Backend) -> None:
    mesh = Mesh.create(world=world.size, rank=world.rank)
    sets = [
        open_process_groups(mesh=mesh, store=world.store, backend=backend, device=CPU, timeout_s=30.0) for _ in range(2)
    ]
    for opened in reversed(sets):
        assert opened.tp.all_gather(torch.tensor([mesh.rank])).tolist() == [0, 1]
    close_process_groups()
