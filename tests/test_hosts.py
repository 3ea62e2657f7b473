"""`dist-infer run` on two hosts of two ranks: dotted names, gloo and the store over a wire, and a wire that breaks."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_infer.launch import mpirun
from tests.netns_hosts import TwoHosts, two_hosts, why_not

GONE_S = 20.0
LIMIT_S = 150.0
MPICH = Path(sys.prefix) / "mpich"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path / "h") as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny_models = pytest.importorskip("tests.tiny_models")
    folder: Path = tiny_models.make_tiny_llama(tmp_path_factory.mktemp("m") / "m", 4, 2, max_position_embeddings=4096)
    return folder


class Job:
    """A `dist-infer run` over both hosts."""

    def __init__(self, hosts: TwoHosts, model: Path, folder: Path, family: str, *, count: int, max_tokens: int) -> None:
        folder.mkdir()
        requests = [{"prompt": [idx + 1], "max_tokens": max_tokens, "ignore_eos": True} for idx in range(count)]
        (folder / "in.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
        self.output, self.log_path, self.hosts = folder / "out.jsonl", folder / "log", hosts
        files = ["-i", str(folder / "in.jsonl"), "-o", str(self.output)]
        options = ["--model", str(model), "--dtype", "float64", "--max-num-seqs", "2"]
        argv = [sys.executable, "-P", "-m", "dist_infer", "run", *files, *options]
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        launcher = mpirun.find_launcher()
        if family == "mpich":
            launcher = mpirun.find_launcher(str(MPICH / "bin" / "mpirun"))
            env["MPI4PY_LIBMPI"] = str(MPICH / "lib" / "libmpi.so.12")
        with open(self.log_path, "wb") as log:
            self.process = mpirun.start(hosts.launch(launcher, argv, env), output=log)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()] if self.output.exists() else []

    def wait_for_a_record(self) -> None:
        until = time.monotonic() + LIMIT_S
        while not self.records():
            assert time.monotonic() < until and self.process.poll() is None, self.log
            time.sleep(0.1)

    def ranks(self) -> list[dict[str, str]]:
        """What the ready lines say, by rank."""
        lines = [line.split("ready ")[1] for line in self.log.splitlines() if "ready rank=" in line]
        return [dict(word.split("=") for word in line.split()) for line in lines]


def families() -> list[Any]:
    return ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)]


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "mpich" and not (MPICH / "bin" / "mpirun").exists():
        pytest.skip("pip: no MPICH in the environment's folder mpich: make test installs it")
    if name == "openmpi" and mpirun.find_launcher().family != "openmpi":
        pytest.skip("host: this environment's mpirun is not Open MPI's")
    return name


@pytest.mark.parametrize("family", families(), indirect=True)
def test_two_hosts_with_dotted_names_answer_all(hosts: TwoHosts, model: Path, tmp_path: Path, family: str) -> None:
    check_whole_job(hosts, model, tmp_path / "job", family)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["openmpi"], indirect=True)
def test_names_that_do_not_resolve_are_no_hindrance(model: Path, tmp_path: Path, family: str) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path / "h", names_resolve=False) as hosts:
        check_whole_job(hosts, model, tmp_path / "job", family)


def check_whole_job(hosts: TwoHosts, model: Path, folder: Path, family: str) -> None:
    job = Job(hosts, model, folder, family, count=8, max_tokens=4)
    try:
        assert job.process.wait(LIMIT_S) == 0, job.log
    finally:
        mpirun.stop(job.process)
    assert sorted(record["custom_id"] for record in job.records()) == [f"line-{idx + 1}" for idx in range(8)]
    names = [host.name for host in hosts.hosts]
    assert [rank["host"] for rank in job.ranks()] == [names[0], names[0], names[1], names[1]]
    assert "gloo" in job.log


@pytest.mark.soak
@pytest.mark.parametrize("family", ["openmpi", "mpich"], indirect=True)
def test_a_wire_that_breaks_ends_all_ranks(hosts: TwoHosts, model: Path, tmp_path: Path, family: str) -> None:
    job = Job(hosts, model, tmp_path / "job", family, count=400, max_tokens=200)
    try:
        job.wait_for_a_record()
        pids = [int(rank["pid"]) for rank in job.ranks()]
        assert len(pids) == 4 and all(map(alive, pids))
        hosts.cut()
        cut_at = time.monotonic()
        while any(map(alive, pids)) and time.monotonic() - cut_at < 2 * GONE_S:
            time.sleep(0.1)
        gone_s = time.monotonic() - cut_at
        assert not any(map(alive, pids)), job.log
        assert gone_s < GONE_S, job.log
        assert mpirun.stop(job.process) != 0  # TERM, 5 s, KILL: mpirun itself may wait for the lost host for ever
        assert "no sign of life" in job.log or "gave no answer" in job.log, job.log
        assert job.records()
        print(f"{family}: all ranks were gone {gone_s:.1f} s after the wire broke")
    finally:
        mpirun.stop(job.process)
        hosts.end_processes()
        hosts.mend()


def alive(pid: int) -> bool:
    """It is there, and not only as the entry that nobody has read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
