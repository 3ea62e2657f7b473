"""Memory for all ranks or one reason for all, and no file that stays."""

import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from dist_infer.comm import shm_segment
from dist_infer.comm.shm_segment import FOLDER, PREFIX, NoSharedMemoryError, open_segment
from dist_infer.errors import DistInferError
from tests.comm.thread_ranks import run_ranks

SIZE = 3


def own_files(folder: Path = FOLDER) -> list[Path]:
    """What this process has left there."""
    return list(folder.glob(f"{PREFIX}{os.getpid()}-*"))


def _open_all(num_bytes: int = 5000, folder: Path = FOLDER) -> list[mmap.mmap]:
    store = HashStore()
    return run_ranks(
        SIZE,
        lambda rank, _: open_segment(
            store=store, rank=rank, size=SIZE, num_bytes=num_bytes, timeout_s=30.0, folder=folder
        ),
    )


def _refusals(open_one: Callable[[int], object]) -> set[str]:
    def main(rank: int) -> str:
        with pytest.raises(NoSharedMemoryError) as caught:
            open_one(rank)
        return str(caught.value)

    return set(run_ranks(SIZE, lambda rank, _: main(rank)))


def _refusals_of(num_bytes: int = 5000, folder: Path = FOLDER) -> set[str]:
    store = HashStore()
    return _refusals(
        lambda rank: open_segment(store=store, rank=rank, size=SIZE, num_bytes=num_bytes, timeout_s=30.0, folder=folder)
    )


def test_all_ranks_see_the_same_bytes_and_the_name_is_gone() -> None:
    segments = _open_all()
    assert own_files() == []
    assert segments[2][:] == bytes(5000)
    segments[0][4999] = 7
    assert [segment[4999] for segment in segments] == [7] * SIZE


def test_too_small_a_file_system_is_one_reason_on_all_ranks() -> None:
    (reason,) = _refusals_of(num_bytes=1 << 50)  # asked for as a whole before any of it is taken
    assert reason == "/dev/shm gives no 1.13e+09 MB (No space left on device)"
    assert own_files() == []


def test_missing_folder_is_one_reason_on_all_ranks(tmp_path: Path) -> None:
    (reason,) = _refusals_of(folder=tmp_path / "none")
    assert "none gives no 0.005 MB (No such file or directory)" in reason


def test_space_that_ends_while_it_is_reserved_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_space(handle: int, offset: int, length: int) -> None:
        assert len(own_files(tmp_path)) == 1  # it had been made
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    (reason,) = _refusals_of(folder=tmp_path)
    assert "No space left on device" in reason
    assert own_files(tmp_path) == []


def test_one_rank_that_cannot_map_it_is_a_reason_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    attach, calls = shm_segment._attach, iter(range(SIZE))

    def fails_once(path: Path, num_bytes: int) -> mmap.mmap:
        return attach(path if next(calls) else path.with_name("other"), num_bytes)

    monkeypatch.setattr(shm_segment, "_attach", fails_once)
    (reason,) = _refusals_of()
    assert "a rank can't map rank 0's file in /dev/shm" in reason and "No such file" in reason
    assert own_files() == []


def test_file_shorter_than_agreed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with pytest.raises(NoSharedMemoryError, match="can't map"):
        shm_segment._attach(path, 5000)


def test_machine_that_reorders_stores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert _refusals_of() == {"a aarch64 may reorder stores, only x86_64 and AMD64 do not"}
    assert own_files() == []


@pytest.mark.parametrize("absent", [0, 2])
def test_rank_that_does_not_come_is_an_error_in_time_and_leaves_no_file(absent: int) -> None:
    store = HashStore()

    def main(rank: int) -> None:
        if rank != absent:
            with pytest.raises(DistInferError, match=rf"rank {rank} did not meet all ranks .* in 0\.2 s"):
                open_segment(store=store, rank=rank, size=SIZE, num_bytes=100, timeout_s=0.2)

    run_ranks(SIZE, lambda rank, _: main(rank))
    assert own_files() == []
