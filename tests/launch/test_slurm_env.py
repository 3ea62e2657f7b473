"""Slurm's variables as typed values."""

import pytest

from dist_infer.launch.slurm_env import SlurmEnv

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_NNODES": "2",
    "SLURM_RESTART_COUNT": "1",
}


def test_a_task_of_a_step() -> None:
    assert SlurmEnv.read(STEP) == SlurmEnv(
        job_id="77",
        num_tasks=4,
        proc_id=3,
        local_id=1,
        local_size=1,
        tasks_on_node=4,
        num_nodes=2,
        in_step=True,
        restart_count=1,
    )


def test_outside_slurm_everything_is_absent() -> None:
    assert SlurmEnv.read({"PATH": "/bin"}) == SlurmEnv(
        job_id=None,
        num_tasks=0,
        proc_id=None,
        local_id=None,
        local_size=None,
        tasks_on_node=None,
        num_nodes=0,
        in_step=False,
        restart_count=0,
    )


def test_a_batch_script_is_no_step() -> None:
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
    read = SlurmEnv.read(batch)
    assert (read.in_step, read.num_tasks) == (False, 8)


@pytest.mark.parametrize(
    ("text", "node", "expected"),
    [("4", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("4(x2),3", "3", None), ("", "0", None), ("4", "", None)],
)
def test_tasks_of_this_node(text: str, node: str, expected: int | None) -> None:
    env = {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
    assert SlurmEnv.read(env).local_size == expected
    assert SlurmEnv.read(env | {"SLURM_STEP_ID": "4294967291"}).local_size is None


def test_a_value_that_is_no_number_is_absent() -> None:
    assert SlurmEnv.read({"SLURM_NTASKS": "4(x2)"}).num_tasks == 0
