"""`dist-infer run` as a user starts it: exit codes, records, drain and death, on a tiny model under mpirun."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dist_infer.errors import ExitCode
from dist_infer.launch import mpirun
from tests.tiny_models import make_tiny_llama

PROGRAM = [sys.executable, "-P", "-m", "dist_infer", "run"]
VANISHING = [sys.executable, "-P", str(Path(__file__).parent / "vanishing_rank.py"), "run"]
MPICH = Path(sys.prefix) / "mpich"
LIMIT_S = 60.0
GONE_S = 20.0
NO_END = "the earlier run has no end: it was killed, or a rank of it vanished"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint without tokenizer."""
    return make_tiny_llama(tmp_path_factory.mktemp("job") / "tiny-llama", 4, 2, max_position_embeddings=4096)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


class Job:
    """A `dist-infer run` under mpirun whose output can be watched."""

    def __init__(
        self, num_ranks: int, arguments: list[str], *, program: list[str] = PROGRAM, mpich: bool = False
    ) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the job
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        if mpich:
            env |= {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
        launcher = mpirun.find_launcher(str(MPICH / "bin" / "mpirun") if mpich else None)
        launch = mpirun.command(num_ranks, [*program, *arguments], launcher=launcher, oversubscribe=True, extra_env=env)
        self.process = mpirun.start(launch, output=self.log)

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code. Errors: TimeoutExpired, after the job was killed."""
        try:
            return self.process.wait(limit_s)
        finally:
            mpirun.stop(self.process)

    def wait_for_records(self, output: Path, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while not output.exists() or output.read_text().count("\n") < count:
            assert time.monotonic() < until and self.process.poll() is None, self.text()
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Process ids by rank, from the ready lines."""
        lines = [line.split("ready ")[1].split() for line in self.text().splitlines() if "ready rank=" in line]
        return [int(dict(word.split("=") for word in words)["pid"]) for words in lines]


def write_requests(folder: Path, lines: list[Any]) -> list[str]:
    path = folder / "in.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return ["-i", str(path), "-o", str(folder / "out.jsonl")]


def read_records(folder: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    by_id = {record["custom_id"]: record for record in records}
    assert len(by_id) == len(records), "a request was answered twice"
    return by_id


def long_requests(count: int) -> list[Any]:
    return [{"prompt": [idx % 100 + 1] * 20, "max_tokens": 60, "ignore_eos": True} for idx in range(count)]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs of a test; none outlives it."""
    started: list[Job] = []
    yield started
    for job in started:
        mpirun.stop(job.process)
        job.log.close()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def assert_gone(pids: list[int]) -> None:
    until = time.monotonic() + 5
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pids)


def test_good_and_bad_lines_on_two_ranks(model: Path, folder: Path, jobs: list[Job]) -> None:
    good = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    lines = [
        good,
        "{broken\n",
        "\n",
        good | {"prompt": "text without a tokenizer"},
        good | {"max_tokens": 10**6},
        good | {"custom_id": "mine"},
        {"custom_id": "chat", "method": "POST", "url": "/v1/completions", "body": good},
        good | {"prompt": [131]},
    ]
    summary = folder / "summary.json"
    options = ["--model", str(model), "--dtype", "float64", "--summary", str(summary)]
    options += ["--kernels", "rms_norm=torch", "--kernels", "moe_route=-triton"]
    jobs.append(Job(2, [*write_requests(folder, lines), *options]))
    assert jobs[0].wait() == ExitCode.FAILED_REQUESTS, jobs[0].text()
    records = read_records(folder)
    assert len(records) == 7
    answered = {name for name, record in records.items() if record["response"]["status_code"] == 200}
    assert answered == {"line-1", "mine", "chat"}
    choices = [records[name]["response"]["body"]["choices"][0]["token_ids"] for name in answered]
    assert len(choices[0]) == 5
    assert choices[0] == choices[1] == choices[2]
    fields = json.loads(summary.read_text())
    assert (fields["outcome"], fields["exit_code"]) == ("done with failed requests", ExitCode.FAILED_REQUESTS)
    assert fields["requests"] == {"ok": 3, "failed": 4, "resumed": 0}
    assert fields["tokens"] == {"prompt": 9, "output": 15}
    assert set(fields["seconds"]) == {"open", "load", "warm up", "prepare", "serve"}
    assert fields["latency_s"]["first_token_from_admission"]["count"] == 3
    assert [rank["rank"] for rank in fields["ranks"]] == [0, 1]
    assert all(rank["kv_peak_blocks"] >= 1 and rank["admitted_tokens"] == 9 for rank in fields["ranks"])
    assert fields["layout"] == {"tp": 2, "dp": 1, "ep": 2}
    assert "rms_norm: torch; triton rejected (not in the order)" in fields["kernels"]
    told = [line.partition("kernels: ")[2] for line in jobs[0].text().splitlines() if "kernels: " in line]
    assert told == fields["kernels"], "each choice once, by rank 0"
    assert jobs[0].text().count("--kernels moe_route=-triton changes nothing: this model has no such op") == 1


def test_a_drain_gives_back_what_has_not_started(model: Path, folder: Path, jobs: list[Job]) -> None:
    arguments = [*write_requests(folder, long_requests(1000)), "--model", str(model), "--max-num-seqs", "4"]
    jobs.append(Job(2, [*arguments, "--summary", str(folder / "summary.json")]))
    jobs[0].wait_for_records(folder / "out.jsonl", 1)
    jobs[0].process.send_signal(signal.SIGUSR1)  # every launcher forwards it to all ranks
    assert jobs[0].wait() == ExitCode.DRAINED, jobs[0].text()
    records = read_records(folder)
    assert 1 <= len(records) < 1000
    for record in records.values():
        assert record["response"]["body"]["usage"]["completion_tokens"] == 60
    fields = json.loads((folder / "summary.json").read_text())
    assert (fields["outcome"], fields["requests"]["ok"]) == ("drained", len(records))


def test_a_drain_takes_no_longer_than_its_grace(model: Path, folder: Path, jobs: list[Job]) -> None:
    lines = [{"prompt": [1, 2], "max_tokens": 2}, {"prompt": [3], "max_tokens": 4000, "ignore_eos": True}]
    arguments = [*write_requests(folder, lines), "--model", str(model), "--grace", "0"]
    jobs.append(Job(2, arguments))
    jobs[0].wait_for_records(folder / "out.jsonl", 1)
    jobs[0].process.send_signal(signal.SIGUSR1)
    assert jobs[0].wait() == ExitCode.DRAINED, jobs[0].text()
    assert list(read_records(folder)) == ["line-1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(model: Path, folder: Path, jobs: list[Job], rank: int) -> None:
    arguments = [*write_requests(folder, long_requests(1000)), "--model", str(model), "--max-num-seqs", "4"]
    jobs.append(Job(2, arguments))
    jobs[0].wait_for_records(folder / "out.jsonl", 1)
    pids = jobs[0].pids()
    os.kill(pids[rank], signal.SIGKILL)
    assert jobs[0].wait(GONE_S) != 0
    assert_gone(pids)
    assert len(read_records(folder)) >= 1  # whole lines only


def test_an_interrupted_launcher_leaves_no_rank(model: Path, folder: Path, jobs: list[Job]) -> None:
    arguments = [*write_requests(folder, long_requests(1000)), "--model", str(model), "--max-num-seqs", "4"]
    for sent in (signal.SIGINT, signal.SIGTERM):
        (folder / "out.jsonl").unlink(missing_ok=True)
        job = Job(2, arguments)
        jobs.append(job)
        job.wait_for_records(folder / "out.jsonl", 1)
        job.process.send_signal(sent)
        assert job.wait(GONE_S) != 0
        assert_gone(job.pids())
        assert read_records(folder)


def without_times(records: dict[str, Any]) -> dict[str, Any]:
    """Records of two runs differ in nothing else."""
    for record in records.values():
        for name in ("created", "timings"):
            record["response"]["body"].pop(name, None)
    return records


@pytest.mark.parametrize("num_kills", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_killed_at_random_moments_and_resumed_it_loses_and_doubles_nothing(
    model: Path, folder: Path, jobs: list[Job], num_kills: int
) -> None:
    lines: list[Any] = [{"prompt": [idx % 100 + 1] * 20, "max_tokens": 15, "ignore_eos": True} for idx in range(120)]
    lines[3], lines[100] = "{broken\n", {"prompt": [131]}
    options = ["--model", str(model), "--max-num-seqs", "4", "--dtype", "float64", "--seed", "7"]
    arguments = [*write_requests(folder, lines), *options]
    jobs.append(Job(2, arguments))
    assert jobs[0].wait() == ExitCode.FAILED_REQUESTS, jobs[0].text()
    clean = without_times(read_records(folder))
    assert len(clean) == 120
    assert json.loads((folder / "out.jsonl.run.json").read_text())["ended"]["exit_code"] == ExitCode.FAILED_REQUESTS
    output = folder / "out.jsonl"
    output.unlink()
    output.with_name("out.jsonl.run.json").unlink()
    moments = random.Random(os.urandom(8))
    endless = []  # runs that had begun and not ended
    for kill in range(num_kills):
        job = Job(2, [*arguments, "--resume"])
        jobs.append(job)
        if kill == 0:
            time.sleep(moments.uniform(0, 3))  # mostly before it begins
        else:
            before = output.read_bytes().count(b'"error":null') if output.exists() else 0
            while job.process.poll() is None and job.pids() == []:
                time.sleep(0.01)
            job.wait_for_records(output, min(110, before + moments.randrange(15)))
            time.sleep(moments.uniform(0, 0.02))
        pids = [pid for pid in job.pids() if moments.random() < 0.7] or [job.process.pid]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait(GONE_S)
        assert_gone(job.pids())
        run_file = folder / "out.jsonl.run.json"
        endless.append(run_file.exists() and "ended" not in json.loads(run_file.read_text()))
    assert any(endless)  # a kill may come late, but not each of them
    jobs.append(Job(2, [*arguments, "--resume"]))
    assert jobs[-1].wait() == ExitCode.FAILED_REQUESTS, jobs[-1].text()
    assert (NO_END in jobs[-1].text()) is endless[-1]
    assert without_times(read_records(folder)) == clean
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.run.json"]


def test_a_rank_that_vanishes_under_mpich_is_told_by_the_resumed_run(
    model: Path, folder: Path, jobs: list[Job]
) -> None:
    """MPICH's mpirun takes os._exit(0) for the end of a rank that was done; the run file has no end."""
    if not (MPICH / "bin" / "mpirun").exists():
        pytest.skip("pip: no MPICH in the environment's folder mpich: make test installs it")
    arguments = [*write_requests(folder, long_requests(12)), "--model", str(model), "--max-num-seqs", "4"]
    jobs.append(Job(2, arguments, program=VANISHING, mpich=True))
    jobs[0].wait()
    assert len(jobs[0].pids()) == 2, jobs[0].text()
    assert_gone(jobs[0].pids())
    assert "ended" not in json.loads((folder / "out.jsonl.run.json").read_text())
    jobs.append(Job(2, [*arguments, "--resume"]))
    assert jobs[1].wait() == ExitCode.DONE, jobs[1].text()
    assert NO_END in jobs[1].text()
    assert all(record["response"]["status_code"] == 200 for record in read_records(folder).values())
    assert len(read_records(folder)) == 12


def test_a_second_writer_is_refused(model: Path, folder: Path, jobs: list[Job]) -> None:
    arguments = [*write_requests(folder, long_requests(1000)), "--model", str(model), "--max-num-seqs", "4"]
    jobs.append(Job(2, arguments))
    jobs[0].wait_for_records(folder / "out.jsonl", 1)
    second = subprocess.run(
        [*PROGRAM, *arguments, "--resume"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=mpirun.scrub(os.environ),
    )
    assert second.returncode == ExitCode.USAGE
    assert f"is being written by process {jobs[0].pids()[0]} on host" in second.stderr
    assert jobs[0].process.poll() is None


def test_a_model_that_is_not_there_is_said_once(folder: Path, jobs: list[Job]) -> None:
    options = ["--model", str(folder / "nowhere"), "--summary", str(folder / "summary.json")]
    jobs.append(Job(2, [*write_requests(folder, []), *options]))
    assert jobs[0].wait() == ExitCode.USAGE
    assert jobs[0].text().count("there is no such folder") == 1
    fields = json.loads((folder / "summary.json").read_text())
    assert (fields["outcome"], fields["exit_code"]) == ("failed", ExitCode.USAGE)
    assert "there is no such folder" in fields["error"]
    assert not (folder / "out.jsonl").exists()


def test_a_library_that_there_is_not_is_said_once(model: Path, folder: Path, jobs: list[Job]) -> None:
    options = ["--model", str(model), "--kernels", "paged_attention.generation=nope"]
    jobs.append(Job(2, [*write_requests(folder, []), *options]))
    assert jobs[0].wait() == ExitCode.USAGE
    message = "paged_attention.generation has no library 'nope': choose from triton, reference"
    assert jobs[0].text().count(message) == 1


def test_without_a_launcher_it_is_a_world_of_one(model: Path, folder: Path) -> None:
    arguments = write_requests(folder, [{"prompt": [5, 6], "max_tokens": 3}])[:2]
    finished = subprocess.run(
        [*PROGRAM, *arguments, "-o", "-", "--model", str(model), "--load-format", "dummy", "--log-level", "warning"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=mpirun.scrub(os.environ),
        cwd=folder,
    )
    assert finished.returncode == ExitCode.DONE, finished.stderr
    (record,) = [json.loads(line) for line in finished.stdout.splitlines()]
    assert record["response"]["body"]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
