"""What Slurm says about this process, as typed values: the one place that knows the names of its variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmEnv:
    """The Slurm variables that matter here. All None or 0 outside a Slurm job."""

    job_id: str | None
    num_tasks: int  # of the step, else of the job
    proc_id: int | None  # the task's rank in its step
    local_id: int | None
    local_size: int | None  # tasks of the step on this node
    tasks_on_node: int | None  # of the job, on its first node
    num_nodes: int
    in_step: bool  # started by srun, not by the batch script or a shell in the allocation
    restart_count: int  # how often the job was requeued

    @classmethod
    def read(cls, env: Mapping[str, str]) -> Self:
        """Read `env`. A value that is no number counts as absent."""
        step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
        in_step = step is not None and step.isdigit() and int(step) < 0xFFFFFFF0  # batch and extern steps are above
        num_tasks = _number(env, "SLURM_STEP_NUM_TASKS") if in_step else None
        node = _number(env, "SLURM_NODEID")
        return cls(
            job_id=env.get("SLURM_JOB_ID"),
            num_tasks=num_tasks or _number(env, "SLURM_NTASKS") or 0,
            proc_id=_number(env, "SLURM_PROCID"),
            local_id=_number(env, "SLURM_LOCALID"),
            local_size=_entry(env, "SLURM_STEP_TASKS_PER_NODE", node) if in_step else None,
            tasks_on_node=_entry(env, "SLURM_TASKS_PER_NODE", 0),
            num_nodes=_number(env, "SLURM_NNODES") or _number(env, "SLURM_JOB_NUM_NODES") or 0,
            in_step=in_step,
            restart_count=_number(env, "SLURM_RESTART_COUNT") or 0,
        )


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    return int(value) if value.isdigit() else None


def _entry(env: Mapping[str, str], name: str, node: int | None) -> int | None:
    """One node's entry of a list such as "4(x2),3"."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get(name, ""))
    entries = [int(tasks) for tasks, times in found for _ in range(int(times or 1))]
    return entries[node] if node is not None and node < len(entries) else None
