"""The steps of a benchmark: timed while they are served, one of them profiled at the end."""

from dist_infer.cli.stage import stage
from dist_infer.cli.startup import kernel_choices
from dist_infer.config import SchedulerConfig
from dist_infer.launch.world import World
from dist_infer.shard import Shard, ShardPlan
from dist_infer.step_floor import StepFloor, read_speed
from dist_infer.step_meter import CudaMarks, HostMarks, TimedRunner
from dist_infer.step_profile import StepProfile, profile_step
from dist_infer.step_report import StepReport, libraries_by_op
from dist_infer.step_runner import PreparedStep, SampledIds, StepRunner
from dist_infer.warmup import make_batch, run_step


class BenchSteps:
    """Times the steps of `inner` on this rank: whoever serves drives `runner`."""

    def __init__(self, plan: ShardPlan, shard: Shard, config: SchedulerConfig, inner: StepRunner, world: World) -> None:
        self._plan, self._shard, self._config, self._inner, self._world = plan, shard, config, inner, world
        self.report = StepReport(StepFloor.of(plan, shard), tp=plan.mesh.tp, tb_per_s=read_speed(plan.device))
        marks = CudaMarks() if plan.device.type == "cuda" else HostMarks()
        self.runner: TimedRunner[PreparedStep, SampledIds] = TimedRunner(inner, marks, self.report.add)

    def fields(self) -> dict[str, object]:
        """All figures of rank 0's steps, on each rank its own.

        Ranks: collective over the world, behind the last step.
        """
        self.runner.tell()
        profile = self._profile() if self._plan.device.type == "cuda" else None
        libraries = libraries_by_op(kernel_choices(self._plan, self._shard))
        return {"device": self._plan.device.type, **self.report.fields(profile), "libraries": libraries}

    def _profile(self) -> StepProfile | None:
        """Of the mean decode step of rank 0, run by all ranks."""
        own = dict(zip(("sequences", "kv_len"), self.report.usual_decode, strict=True))
        usual = self._world.vote("choose the step to profile", None, own)[0]
        if not usual["sequences"]:
            return None
        parts = [(1, int(usual["kv_len"]))] * int(usual["sequences"])
        batch = make_batch(parts, block_size=self._config.block_size)
        return stage(
            self._world,
            "profile a decode step",
            lambda: profile_step(lambda: run_step(self._inner, batch, world_size=self._world.size), self._plan.device),
        )
