import errno
import os
import threading
from pathlib import Path

import pytest

from dist_infer.errors import DistInferError
from dist_infer.intake.output_lock import OutputLock
from dist_infer.intake.record_file import RecordFile, Write, write_atomically
from dist_infer.intake.records import encode_record
from tests.intake.record_samples import answer, line_numbers


def open_file(path: Path, *, write: Write = os.write) -> RecordFile:
    return RecordFile(path, lock=OutputLock.take(path), write=write)


def test_records_are_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = open_file(path)
    assert not path.exists()
    file.begin()
    file.write(answer(2), model="m")
    assert line_numbers(path) == [2]
    file.write(answer(1), model="m")
    file.close()
    file.close()
    assert line_numbers(path) == [2, 1]
    assert not (tmp_path / "out.jsonl.lock").exists()
    with pytest.raises(ValueError, match="after close"):
        file.write(answer(3), model="m")


def test_a_job_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    open_file(tmp_path / "out").close()
    assert list(tmp_path.iterdir()) == []


def test_an_output_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("theirs\n")
    file = open_file(path)
    with pytest.raises(DistInferError, match="File exists"):
        file.begin()
    assert path.read_text() == "theirs\n"
    file.begin(overwrite=True)
    assert path.read_bytes() == b""
    file.close()


def test_what_is_worth_keeping_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    first = encode_record(answer(1), model="m")
    path.write_bytes(first + b'{"id": "torn')
    file = open_file(path)
    file.begin(keep_bytes=len(first), num_kept=1)
    file.write(answer(2), model="m")
    file.close()
    assert line_numbers(path) == [1, 2]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("num_bytes", [0, 1, 100])
def test_a_disk_that_is_full_leaves_whole_records(tmp_path: Path, code: int, num_bytes: int) -> None:
    """The third record fits in part: first a short write, then the error."""
    path = tmp_path / "out"
    calls = []

    def write(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) < 3:
            return os.write(fd, data)
        if len(calls) == 3 and num_bytes:
            return os.write(fd, data[:num_bytes])
        raise OSError(code, os.strerror(code))

    file = open_file(path, write=write)
    file.begin()
    file.write(answer(1), model="m")
    file.write(answer(2), model="m")
    cause = r"Input/output error.*safe; cure that" if code == errno.EIO else "no space is left.*safe; make room"
    for line in (3, 4):  # and no later one is written, though it may fit
        with pytest.raises(DistInferError, match=rf"out: {cause.replace('safe', '2 records are safe')}.*--resume"):
            file.write(answer(line), model="m")
        assert line_numbers(path) == [1, 2]
    assert len(calls) == (4 if num_bytes else 3)
    file.close()
    assert line_numbers(path) == [1, 2]


def test_the_planted_fault_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the cut, half a record stays."""
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: None)
    with pytest.raises(AssertionError):
        test_a_disk_that_is_full_leaves_whole_records(tmp_path, errno.ENOSPC, 100)


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    file = open_file(tmp_path / "out", write=lambda fd, data: os.write(fd, data[:7]))
    file.begin()
    file.write(answer(1), model="m")
    file.close()
    assert line_numbers(tmp_path / "out") == [1]


def test_records_are_brought_to_the_disk_while_the_job_runs(tmp_path: Path) -> None:
    synced = threading.Semaphore(0)

    def fsync(fd: int) -> None:
        synced.release()

    path = tmp_path / "out"
    file = RecordFile(path, lock=OutputLock.take(path), fsync=fsync, sync_interval_s=0.001)
    file.begin()
    assert synced.acquire(timeout=30)  # by begin
    for line in (1, 2):
        file.write(answer(line), model="m")
        assert synced.acquire(timeout=30)
    file.close()
    assert synced.acquire(timeout=30)
    assert not synced.acquire(timeout=0.02)  # nothing was written: nothing is synced


def test_a_disk_that_does_not_keep_records_is_told_at_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    failed = threading.Event()
    broken = False

    def fsync(fd: int) -> None:
        if broken:
            failed.set()
            raise OSError(errno.EIO, "Input/output error")

    file = RecordFile(path, lock=OutputLock.take(path), fsync=fsync, sync_interval_s=0.001)
    file.begin()
    broken = True
    file.write(answer(1), model="m")
    assert failed.wait(30)
    file._sync._thread.join(30)  # type: ignore[union-attr]
    with pytest.raises(DistInferError, match="Input/output error"):
        file.write(answer(2), model="m")
    with pytest.raises(DistInferError, match="Input/output error"):
        file.close()
    assert not (tmp_path / "out.lock").exists()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, b"first")
    write_atomically(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]
