import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dist_infer.errors import UsageError
from dist_infer.intake.output_lock import Holder, OutputLock


def lock_file(output: Path) -> Path:
    return output.with_name(output.name + ".lock")


def write_holder(output: Path, **changes: object) -> None:
    fields = {"host": socket.gethostname(), "pid": os.getpid(), "started": "1", "job_id": None} | changes
    lock_file(output).write_text(json.dumps(fields))


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_writer_who_is_named(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    lock = OutputLock.take(output, job_id="77")
    fields = json.loads(lock_file(output).read_text())
    assert (fields["host"], fields["pid"], fields["job_id"]) == (socket.gethostname(), os.getpid(), "77")
    with pytest.raises(UsageError, match=f"written by process {os.getpid()} on host .*, job 77; wait for it"):
        OutputLock.take(output)
    lock.release()
    lock.release()
    assert not lock_file(output).exists()
    OutputLock.take(output).release()


def test_two_outputs_have_two_locks(tmp_path: Path) -> None:
    first, second = OutputLock.take(tmp_path / "a"), OutputLock.take(tmp_path / "b")
    first.release()
    second.release()


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    program = (
        "import os, sys, pathlib; from dist_infer.intake.output_lock import OutputLock; "
        "lock = OutputLock.take(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(output)], check=False).returncode == -9
    assert lock_file(output).exists()
    OutputLock.take(output).release()
    assert not lock_file(output).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "a"}'])
def test_a_lock_that_names_nobody_is_taken_over(tmp_path: Path, text: str) -> None:
    lock_file(tmp_path / "out").write_text(text)
    OutputLock.take(tmp_path / "out").release()


def test_a_dead_pid_and_a_pid_that_is_another_process_now_are_taken_over(tmp_path: Path) -> None:
    for pid in (dead_pid(), os.getpid()):
        write_holder(tmp_path / "out", pid=pid)
        OutputLock.take(tmp_path / "out").release()


def test_a_process_that_lives_is_refused_where_its_file_lock_is_not_seen(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_holder(output, started=Holder.this_process(None).started)
    with pytest.raises(UsageError, match=rf"process {os.getpid()} on host .*as out\.lock says; wait for it"):
        OutputLock.take(output)
    assert lock_file(output).exists()


def test_another_host_is_refused_with_the_fix(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_holder(output, host="elsewhere", pid=5, job_id="12")
    with pytest.raises(UsageError, match=r"process 5 on host elsewhere, job 12.*is over, run: rm .*out\.lock"):
        OutputLock.take(output)
    lock_file(output).unlink()
    OutputLock.take(output).release()


@pytest.mark.parametrize(
    ("then", "now", "over"),
    [
        ("12", "12 restart 1", True),
        ("12 restart 9", "12 restart 10", True),
        ("12", "12", False),  # two steps of one job
        ("12 restart 1", "12 restart 1", False),
        ("12", "13 restart 1", False),
        (None, "12 restart 1", False),
        ("12", None, False),
    ],
)
def test_an_earlier_life_of_a_requeued_job_is_over(
    tmp_path: Path, then: str | None, now: str | None, over: bool
) -> None:
    output = tmp_path / "out"
    write_holder(output, host="elsewhere", pid=5, job_id=then)
    if over:
        OutputLock.take(output, job_id=now).release()
    else:
        with pytest.raises(UsageError, match="host elsewhere"):
            OutputLock.take(output, job_id=now)


def test_without_file_locks_the_names_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = OutputLock.take(tmp_path / "out")
    with pytest.raises(UsageError, match="as out.lock says"):
        OutputLock.take(tmp_path / "out")
    lock.release()
    write_holder(tmp_path / "out", pid=dead_pid())
    OutputLock.take(tmp_path / "out").release()


def test_a_folder_that_can_not_hold_a_lock_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lock file .*no/out\.lock"):
        OutputLock.take(tmp_path / "no" / "out")
