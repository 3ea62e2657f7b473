"""Files of a job in their three moments, and resume: whatever is left of an output, the records end up those of a clean
run.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dist_infer.errors import DistInferError, ExitCode, RequestError, UsageError
from dist_infer.intake.batch_file import ReadableWriter, RecordStream
from dist_infer.intake.batch_job import BatchJob
from dist_infer.intake.job_files import FileOptions, JobFiles
from dist_infer.intake.line_filter import Shard
from dist_infer.intake.run_file import RunFile
from dist_infer.intake.validate import RequestLimits
from dist_infer.types import Request, StepOutput
from tests.intake.record_samples import answer, failure, line_numbers, read_records

LINES = ['{"prompt": [1], "max_tokens": 2}', "", "{broken", '{"prompt": [2]}', '{"prompt": [999]}', '{"prompt": [1]}']


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of runs, none of which is about a loss of power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def fits(request: Request) -> None:
    if request.sampling.max_tokens > 50:
        raise RequestError("it never fits", param="max_tokens")


def options(folder: Path, **changes: Any) -> FileOptions:
    values = {"input_path": str(folder / "in.jsonl"), "output_path": str(folder / "out.jsonl")}
    return FileOptions(**(values | changes))


def write_input(folder: Path, lines: Sequence[str] = LINES) -> Path:
    (folder / "in.jsonl").write_text("\n".join(lines))
    return folder / "out.jsonl"


def open_job(files: JobFiles) -> BatchJob:
    return BatchJob(
        lines=files.lines,
        answers=files.answers,
        text=None,
        limits=RequestLimits(vocab_size=500, max_model_len=100, check_fits=fits),
        eos_token_ids=(),
        model_name="m",
        run_seed=files.seed,
        num_failed_before=files.num_failed,
        now=lambda: 0.0,
        clock=lambda: 0.0,
    )


def serve(job: BatchJob, *, room: int = 3, limit: int = 10**9) -> int:
    """An engine that answers with the request's seed, newest first; the number of answers."""
    count = 0
    while not job.exhausted and count < limit:
        for request in reversed(job.poll(room).requests):
            if count == limit:
                break
            token = request.sampling.seed % 500
            job.deliver(StepOutput(request_id=request.request_id, token_ids=(token,), finish_reason="length"))
            count += 1
    return count


def run(folder: Path, *, limit: int = 10**9, die: bool = False, **changes: Any) -> ExitCode:
    """A job from its opening to its end, or to its death after `limit` answers."""
    files = JobFiles.open(options(folder, **changes))
    files.check({"model": "digest"})
    files.begin({"hosts": ["here"]})
    job = open_job(files)
    serve(job, limit=limit)
    if die:
        job.fail_open("rank 1 died")
    job.close()
    files.close()
    return job.exit_code


def records(path: Path) -> dict[str, Any]:
    """By id, each exactly once."""
    found = read_records(path)
    by_id = {record["id"]: record for record in found}
    assert len(by_id) == len(found), "a request was answered twice"
    return by_id


def test_a_run_leaves_records_and_a_run_file(tmp_path: Path) -> None:
    out = write_input(tmp_path)
    assert run(tmp_path) is ExitCode.FAILED_REQUESTS
    assert sorted(line_numbers(out)) == [1, 3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]
    fields = json.loads(RunFile.path_for(out).read_text())
    assert fields["hosts"] == ["here"]
    assert set(fields["identity"]) == {"input", "shard", "seed", "model"}


def test_a_job_that_fails_before_it_begins_leaves_nothing(tmp_path: Path) -> None:
    write_input(tmp_path)
    files = JobFiles.open(options(tmp_path))
    assert (tmp_path / "out.jsonl.lock").exists()
    files.close()
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_output_that_exists_is_left_alone_or_replaced_or_continued(tmp_path: Path) -> None:
    out = write_input(tmp_path)
    run(tmp_path, seed=1)
    before = out.read_bytes()
    with pytest.raises(UsageError, match="out.jsonl exists: --resume continues it, --overwrite replaces it"):
        JobFiles.open(options(tmp_path))
    assert not (tmp_path / "out.jsonl.lock").exists()
    run(tmp_path, resume=True)
    assert out.read_bytes() == before
    files = JobFiles.open(options(tmp_path, overwrite=True))
    files.close()
    assert out.read_bytes() == before  # nothing is replaced before the job begins
    run(tmp_path, overwrite=True, seed=2)
    assert out.read_bytes() != before


def test_one_writer(tmp_path: Path) -> None:
    write_input(tmp_path)
    files = JobFiles.open(options(tmp_path, job_id="9"))
    (tmp_path / "link").symlink_to(tmp_path / "out.jsonl")
    for output in ("out.jsonl", "link"):
        with pytest.raises(UsageError, match="is being written by process .*job 9"):
            JobFiles.open(options(tmp_path, output_path=str(tmp_path / output), resume=True))
    files.close()


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_input_and_output_must_differ(tmp_path: Path, link: object) -> None:
    write_input(tmp_path, ["mine"])
    output = tmp_path / "in.jsonl"
    if callable(link):
        output = tmp_path / "out.jsonl"
        link(tmp_path / "in.jsonl", output)
    for flags in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(UsageError, match="one file"):
            JobFiles.open(options(tmp_path, output_path=str(output), **flags))
    assert (tmp_path / "in.jsonl").read_text() == "mine"


def test_an_output_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    write_input(tmp_path)
    with pytest.raises(UsageError, match="no does not exist"):
        JobFiles.open(options(tmp_path, output_path=str(tmp_path / "no" / "out")))
    with pytest.raises(UsageError, match="folder"):
        JobFiles.open(options(tmp_path, output_path=str(tmp_path)))
    with pytest.raises(UsageError, match="No such file"):
        JobFiles.open(options(tmp_path, input_path=str(tmp_path / "missing")))


def test_streams_are_neither_locked_nor_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_input(tmp_path)
    files = JobFiles.open(options(tmp_path, input_path=None, prompts=["one"], output_path=None))
    assert isinstance(files.answers, ReadableWriter)
    files.begin({})
    files.answers.write(answer(1), model="m")
    files.close()
    assert capsys.readouterr().out == "> one\nHi\n\n"
    for output in ("-", "/dev/null"):
        files = JobFiles.open(options(tmp_path, output_path=output))
        assert isinstance(files.answers, RecordStream) and not files.keeps_run_file
        files.close()
        with pytest.raises(UsageError, match="--resume needs an output that is a file"):
            JobFiles.open(options(tmp_path, output_path=output, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_pipe_can_not_be_resumed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    keep = os.open(tmp_path / "pipe", os.O_RDWR)
    files = JobFiles.open(options(tmp_path, input_path=str(tmp_path / "pipe")))
    files.close()
    with pytest.raises(UsageError, match="--resume needs an input that can be read again"):
        JobFiles.open(options(tmp_path, input_path=str(tmp_path / "pipe"), resume=True))
    os.close(keep)


def test_a_fresh_seed_is_kept_for_the_runs_that_resume(tmp_path: Path) -> None:
    out = write_input(tmp_path)
    seeds = set()
    for flags in ({}, {"resume": True}, {"resume": True}, {"overwrite": True}):
        files = JobFiles.open(options(tmp_path, **flags))
        files.begin({})
        seeds.add(files.seed)
        files.close()
        run_file = RunFile.read(out)
        assert run_file is not None and run_file.identity["seed"] == files.seed
    assert len(seeds) == 2
    with pytest.raises(UsageError, match="seed is 5.*leave --seed out"):
        JobFiles.open(options(tmp_path, resume=True, seed=5))


def test_a_run_of_something_else_is_not_resumed(tmp_path: Path) -> None:
    out = write_input(tmp_path)
    run(tmp_path, limit=1)
    left = out.read_bytes()
    with pytest.raises(UsageError, match="shard is 1/2, .* it is none"):
        run(tmp_path, resume=True, shard=Shard(1, 2))
    files = JobFiles.open(options(tmp_path, resume=True))
    with pytest.raises(UsageError, match="model is other, .* it is digest"):
        files.check({"model": "other"})
    files.close()
    write_input(tmp_path, [*LINES, '{"prompt": [3]}'])
    with pytest.raises(UsageError, match="input is .*give the input of that run"):
        run(tmp_path, resume=True)
    RunFile.path_for(out).unlink()
    with pytest.raises(UsageError, match=r"there is no out\.jsonl\.run\.json"):
        run(tmp_path, resume=True)
    assert out.read_bytes() == left
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_a_line_that_was_changed_while_the_job_ran_is_found(tmp_path: Path) -> None:
    """The digest of the whole file was taken before the change; the record has that of the line as it was read."""
    out = write_input(tmp_path, ['{"prompt": [1]}', '{"prompt": [2]}'])
    run(tmp_path, limit=1)
    (record,) = out.read_text().splitlines()
    key = json.loads(record)["id"]
    out.write_text(record.replace(key, key[:-1] + ("0" if key[-1] != "0" else "1")) + "\n")
    with pytest.raises(DistInferError, match="line 2 of the input is not the one that was answered"):
        run(tmp_path, resume=True)


def test_resume_without_an_output_is_the_first_run(tmp_path: Path) -> None:
    out = write_input(tmp_path)
    run(tmp_path, resume=True)
    assert len(records(out)) == 5


def test_shards_together_are_the_whole(tmp_path: Path) -> None:
    out = write_input(tmp_path)
    run(tmp_path, seed=3)
    whole = records(out)
    parts: dict[str, Any] = {}
    for number in (1, 2, 3):
        part = tmp_path / f"part-{number}"
        run(tmp_path, seed=3, shard=Shard(number, 3), output_path=str(part))
        parts |= records(part)
    assert parts == whole


def clean_run(folder: Path) -> tuple[Path, dict[str, Any]]:
    out = write_input(folder, [*LINES, *(json.dumps({"prompt": [idx % 400]}) for idx in range(20))])
    run(folder)
    return out, records(out)


def test_an_output_that_was_cut_at_any_byte_is_completed(tmp_path: Path) -> None:
    """Every offset of the last three records."""
    out, clean = clean_run(tmp_path)
    data = out.read_bytes()
    third_last = len(b"".join(data.splitlines(keepends=True)[:-3]))
    for length in range(third_last, len(data) + 1):
        out.write_bytes(data[:length])
        assert run(tmp_path, resume=True) is ExitCode.FAILED_REQUESTS
        assert records(out) == clean, length


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 11, 22])
@pytest.mark.parametrize("die", [False, True])
def test_a_job_that_stopped_or_failed_is_completed(tmp_path: Path, limit: int, die: bool) -> None:
    """Stopped: what is open has no record. Failed: it has a record that says so, which a resumed run replaces."""
    out, clean = clean_run(tmp_path)
    seed = json.loads(RunFile.path_for(out).read_text())["identity"]["seed"]
    run(tmp_path, overwrite=True, seed=seed, limit=limit, die=die)
    died = [record for record in read_records(out) if record["response"] is None]
    assert bool(died) == (die and limit in (1, 5, 11))  # else no request was open
    for _ in range(2):  # and then it is complete
        run(tmp_path, resume=True)
        assert records(out) == clean


def test_a_job_that_fails_again_and_again_gets_there(tmp_path: Path) -> None:
    out, clean = clean_run(tmp_path)
    seed = json.loads(RunFile.path_for(out).read_text())["identity"]["seed"]
    run(tmp_path, overwrite=True, seed=seed, limit=0, die=True)
    num_runs = 0
    while records(out) != clean:
        with out.open("ab") as file:
            file.write(b'{"id": "torn')
        run(tmp_path, resume=True, limit=2, die=True)
        num_runs += 1
    assert 5 < num_runs < 30


@pytest.mark.parametrize("fault", ["failed records kept", "torn end kept", "answered lines forgotten"])
def test_the_planted_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    out, clean = clean_run(tmp_path)
    data = out.read_bytes()
    from dist_infer.intake import job_files, line_filter, resume

    if fault == "failed records kept":
        out.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1])
        last = json.loads(data.splitlines()[-1])
        dead = failure(int(last["id"].split("_")[2]))
        line = json.dumps(
            {"id": last["id"], "custom_id": dead.custom_id, "response": None, "error": {"code": "job_failed"}}
        )
        with out.open("a") as file:
            file.write(line + "\n")
        monkeypatch.setattr(resume, "JOB_FAILED", "something else")
    elif fault == "torn end kept":
        out.write_bytes(data[:-5])
        monkeypatch.setattr(job_files, "cut_output", lambda path, found: path.stat().st_size)
    else:
        monkeypatch.setattr(line_filter.LineFilter, "_is_skipped", lambda self, line: False)
    run(tmp_path, resume=True)
    with pytest.raises((AssertionError, json.JSONDecodeError)):
        assert records(out) == clean


def test_a_full_disk_stops_the_job_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, clean = clean_run(tmp_path)
    seed = json.loads(RunFile.path_for(out).read_text())["identity"]["seed"]
    files = JobFiles.open(options(tmp_path, overwrite=True, seed=seed))
    files.check({"model": "digest"})
    files.begin({})
    job = open_job(files)
    room = [3000]

    def write(fd: int, data: memoryview) -> int:
        taken = min(len(data), room[0])
        room[0] -= taken
        if not taken:
            raise OSError(28, "No space left on device")
        return os.write(fd, data[:taken])

    monkeypatch.setattr(files.answers, "_write", write)
    with pytest.raises(DistInferError, match=r"no space is left.*records are safe.*--resume"):
        serve(job)
    with suppress(DistInferError):  # as the dispatcher does
        job.fail_open("no space")
    job.close()
    kept = records(out)
    assert 3 < len(kept) < len(clean) and kept.items() <= clean.items()
    shutil.copy(out, tmp_path / "copy")
    run(tmp_path, resume=True)
    assert records(out) == clean


@pytest.mark.parametrize(
    ("num_lines", "limit_mb"), [(20_000, 20), pytest.param(1_000_000, 200, marks=pytest.mark.soak)]
)
def test_memory_does_not_grow_with_the_input(tmp_path: Path, num_lines: int, limit_mb: int) -> None:
    """In a process of its own; resumed, each line costs 8 bytes."""
    command = [sys.executable, "-m", "tests.intake.long_input", str(tmp_path), str(num_lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    first, resumed = (int(line) for line in done.stdout.split())
    assert 0 < first <= resumed < limit_mb * 2**20
