"""The scripts of slurm/ as a user submits them, on a real Slurm of virtual nodes: nothing lost, nothing doubled."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm_cluster import SlurmCluster, running_cluster, why_not
from tests.source_tree import ROOT

SCRIPTS = ROOT / "slurm"
SMALL = ("--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--time=10")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
LIMIT_S = 240.0
ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="dist-infer-slurm-") as folder,
        running_cluster(Path(folder) / "c", cpus=8) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint without tokenizer."""
    tiny_models = pytest.importorskip("tests.tiny_models")
    folder: Path = tiny_models.make_tiny_llama(
        tmp_path_factory.mktemp("model") / "m", 4, 2, max_position_embeddings=4096
    )
    return folder


class Submitted:
    """A job of one script in a folder of its own."""

    def __init__(self, cluster: SlurmCluster, model: Path, folder: Path, *, count: int, max_tokens: int) -> None:
        self.cluster = cluster
        self.folder = folder
        self.count = count
        self.job_id = ""
        folder.mkdir(exist_ok=True)
        requests = [
            {"prompt": [idx % 100 + 1] * 8, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            for idx in range(count)
        ]
        (folder / "requests.jsonl").write_text("".join(json.dumps(request) + "\n" for request in requests))
        self.options = f"--model {model} --dtype float64 --max-num-seqs 2"

    def submit(self, script: str, *options: str, **variables: str) -> "Submitted":
        variables = ENVIRONMENT | {"OPTIONS": self.options} | variables
        path = SCRIPTS / script
        self.job_id = self.cluster.submit(path, *SMALL, *options, log=self.folder / "log", **variables)
        return self

    def ended(self, limit_s: float = LIMIT_S) -> dict[str, str]:
        return self.cluster.wait(self.job_id, *ENDED, limit_s=limit_s)

    def ended_with_restarts(self, limit_s: float = 1800.0) -> dict[str, str]:
        """Slurm waits two minutes before it starts a requeued job again; here it need not."""
        until = time.monotonic() + limit_s
        while (fields := self.cluster.job(self.job_id))["JobState"] not in ENDED:
            assert time.monotonic() < until, self.log
            if fields["JobState"] == "PENDING" and fields["Reason"] == "BeginTime":
                self.cluster.call("scontrol", "update", f"jobid={self.job_id}", "StartTime=now", check=False)
            time.sleep(0.5)
        return fields

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, pattern: str = "answers*.jsonl") -> list[dict[str, Any]]:
        """All of them, whole lines only."""
        texts = [path.read_text() for path in sorted(self.folder.glob(pattern))]
        assert all(text.endswith("\n") for text in texts if text)
        return [json.loads(line) for text in texts for line in text.splitlines()]

    def wait_for_records(self, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while len(self.records()) < count:
            assert time.monotonic() < until and self.cluster.job(self.job_id)["JobState"] not in ENDED, self.log
            time.sleep(0.2)

    def assert_whole(self) -> None:
        """Every request has one answer."""
        records = self.records()
        names = sorted(record["custom_id"] for record in records)
        assert names == sorted(f"line-{idx + 1}" for idx in range(self.count)), self.log
        assert all(record["response"]["status_code"] == 200 for record in records)


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Submitted]:
    """All jobs of the quick tests, submitted together: they share the cores, not the waiting."""
    root = tmp_path_factory.mktemp("jobs")

    def make(name: str, count: int = 12, max_tokens: int = 5) -> Submitted:
        return Submitted(cluster, model, root / name, count=count, max_tokens=max_tokens)

    return {
        "drained": make("drained", 300, 200).submit("run.sbatch"),
        "cancelled": make("cancelled", 300, 200).submit("run.sbatch"),
        "nodes": make("nodes").submit("run-multinode.sbatch"),
        "array": make("array").submit("array.sbatch", "--array=1-2", PARTS="2"),
        "mpirun": make("mpirun").submit("run-multinode.sbatch", LAUNCH="mpirun --bind-to none"),
        "singletons": make("singletons").submit("run.sbatch", LAUNCH="srun --mpi=none"),
    }


def test_a_signal_drains_with_code_75_and_the_same_command_goes_on(jobs: dict[str, Submitted]) -> None:
    job = jobs["drained"]
    job.wait_for_records(2)
    job.cluster.call("scancel", "--batch", "--signal=USR1", job.job_id)
    fields = job.ended()
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "75:0"), job.log
    num_done = len(job.records())
    assert 2 <= num_done < job.count
    assert "got SIGUSR1 and drains" in job.log


def test_a_cancelled_job_leaves_whole_records_and_no_process(jobs: dict[str, Submitted]) -> None:
    job = jobs["cancelled"]
    job.wait_for_records(1)
    job.cluster.call("scancel", job.job_id)
    assert job.ended()["JobState"] == "CANCELLED"
    assert 1 <= len(job.records()) < job.count
    assert processes_of(job.folder) == []


def test_two_nodes_of_two_ranks_by_srun(jobs: dict[str, Submitted]) -> None:
    job = jobs["nodes"]
    assert job.ended()["JobState"] == "COMPLETED", job.log
    job.assert_whole()
    assert hosts_of_ranks(job) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_two_nodes_of_two_ranks_by_mpirun(jobs: dict[str, Submitted]) -> None:
    job = jobs["mpirun"]
    assert job.ended()["JobState"] == "COMPLETED", job.log
    job.assert_whole()
    assert hosts_of_ranks(job) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_an_array_answers_each_line_once(jobs: dict[str, Submitted]) -> None:
    job = jobs["array"]
    for part in (1, 2):
        assert job.cluster.wait(f"{job.job_id}_{part}", *ENDED, limit_s=LIMIT_S)["JobState"] == "COMPLETED", job.log
    job.assert_whole()
    assert len(job.records("answers-1.jsonl")) == len(job.records("answers-2.jsonl")) == job.count // 2


def test_srun_without_pmix_is_refused(jobs: dict[str, Submitted]) -> None:
    assert_refused(jobs["singletons"], "srun started 2 tasks without MPI, so each would be a world of one")


@pytest.mark.soak
def test_ranks_packed_on_one_node_are_refused(cluster: SlurmCluster, model: Path, tmp_path: Path) -> None:
    job = Submitted(cluster, model, tmp_path / "job", count=2, max_tokens=2)
    job.submit("run-multinode.sbatch", LAUNCH="mpirun --bind-to none --oversubscribe --map-by core")
    assert_refused(job, "4 ranks are on one host, but this Slurm job has 2 nodes of 2 tasks")


def assert_refused(job: Submitted, says: str) -> None:
    fields = job.ended()
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "2:0"), job.log
    assert says in job.log
    assert not job.records()


@pytest.mark.soak
def test_a_job_that_meets_its_time_limit_goes_on_when_it_is_submitted_again(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    job = Submitted(cluster, model, tmp_path / "job", count=320, max_tokens=200)
    job.submit("run.sbatch", "--time=1", "--signal=B:USR1@0")  # no warning
    assert job.ended()["JobState"] == "TIMEOUT", job.log
    assert 0 < len(job.records()) < job.count
    assert processes_of(job.folder) == []
    assert job.submit("run.sbatch", "--time=30").ended(limit_s=1800)["JobState"] == "COMPLETED", job.log
    job.assert_whole()


@pytest.mark.soak
def test_a_job_longer_than_its_time_limit_requeues_itself_until_all_is_answered(
    cluster: SlurmCluster, model: Path, tmp_path: Path
) -> None:
    job = Submitted(cluster, model, tmp_path / "job", count=320, max_tokens=200)
    job.options += " --grace 5"
    job.submit("requeue.sbatch", "--time=2", "--signal=B:USR1@30")  # Slurm may send it a minute earlier
    fields = job.ended_with_restarts()
    assert fields["JobState"] == "COMPLETED", f"{fields['JobState']} {fields['ExitCode']}: {job.log}"
    assert int(fields["Restarts"]) >= 1
    assert "got SIGUSR1 and drains" in job.log
    job.assert_whole()


@pytest.mark.soak
def test_a_preempted_job_comes_back_and_loses_nothing(cluster: SlurmCluster, model: Path, tmp_path: Path) -> None:
    job = Submitted(cluster, model, tmp_path / "job", count=200, max_tokens=200)
    job.submit("requeue.sbatch")
    job.wait_for_records(5)
    urgent = Submitted(cluster, model, tmp_path / "urgent", count=4, max_tokens=4)
    urgent.submit("run-multinode.sbatch", "--partition=urgent", "--exclusive")
    assert urgent.ended()["JobState"] == "COMPLETED", urgent.log
    urgent.assert_whole()
    fields = job.ended_with_restarts()
    assert fields["JobState"] == "COMPLETED", job.log
    assert int(fields["Restarts"]) >= 1
    job.assert_whole()


def hosts_of_ranks(job: Submitted) -> dict[int, str]:
    ready = [line.split("ready ")[1] for line in job.log.splitlines() if "ready rank=" in line]
    fields = [dict(word.split("=") for word in line.split()) for line in ready]
    return {int(each["rank"]): each["host"] for each in fields}


def processes_of(folder: Path) -> list[int]:
    """Processes that work in the folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(os.readlink(f"/proc/{pid}/cwd")) == folder:
                found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sbatch")))
def test_shellcheck_has_nothing_to_say(script: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("apt: shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", SCRIPTS / script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
