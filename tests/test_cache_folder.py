"""A folder of one's own, and a lock that a dead process gives back."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_infer.cache_folder import locked, open_private_folder
from dist_infer.errors import UsageError

HOLD_LOCK = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def fail_if_called() -> None:
    raise AssertionError("nobody holds the lock")


def test_folder_is_made_for_the_user_only(tmp_path: Path) -> None:
    made = open_private_folder(tmp_path / "a" / "cache")
    assert made == tmp_path / "a" / "cache" and made.stat().st_mode & 0o777 == 0o700
    assert open_private_folder(made) == made


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o701])
def test_folder_that_is_open_to_others(mode: int, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(UsageError, match=f"open to other users; close it first: chmod 700 {cache}"):
        open_private_folder(cache)


def test_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(UsageError, match="belongs to user"):
        open_private_folder(tmp_path / "cache")


def test_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(UsageError, match="can't be created: .*DIST_INFER_CACHE"):
            open_private_folder(path)


def test_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    turns = 0

    def on_wait() -> None:
        nonlocal turns
        turns += 1
        if turns == 2:
            holder.kill()

    with locked(path, on_wait):
        assert turns >= 2
    holder.communicate()


def test_lock_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with pytest.raises(KeyError), locked(path, fail_if_called):
            raise KeyError
    with locked(path, fail_if_called):
        pass


def test_waiting_ends_with_what_the_callback_raises(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def give_up() -> None:
        raise TimeoutError

    with locked(path, fail_if_called):
        with pytest.raises(TimeoutError), locked(path, give_up):
            pass
        with pytest.raises(TimeoutError), locked(path, give_up):
            pass


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with (
        pytest.raises(UsageError, match="No locks available.*DIST_INFER_CACHE"),
        locked(tmp_path / "lock", fail_if_called),
    ):
        pass
