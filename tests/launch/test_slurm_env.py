"""Slurm's variables as typed values."""

from dist_infer.launch.slurm_env import SlurmEnv

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_RESTART_COUNT": "1",
}


def test_a_task_of_a_step() -> None:
    assert SlurmEnv.read(STEP) == SlurmEnv(
        job_id="77", num_tasks=4, proc_id=3, local_id=1, num_nodes=2, in_step=True, restart_count=1
    )


def test_outside_slurm_everything_is_absent() -> None:
    assert SlurmEnv.read({"PATH": "/bin"}) == SlurmEnv(
        job_id=None, num_tasks=0, proc_id=None, local_id=None, num_nodes=0, in_step=False, restart_count=0
    )


def test_a_batch_script_is_no_step() -> None:
    batch = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}
    read = SlurmEnv.read(batch)
    assert (read.in_step, read.num_tasks) == (False, 8)


def test_a_value_that_is_no_number_is_absent() -> None:
    assert SlurmEnv.read({"SLURM_NTASKS": "4(x2)"}).num_tasks == 0
