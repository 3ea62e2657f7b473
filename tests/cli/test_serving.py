"""What `run` and `bench` have in common beyond what their own tests show."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from dist_infer.cli.options import RunOptions
from dist_infer.cli.serving import agree_on_kernels, agree_on_options, gather_reports
from dist_infer.cli.summary import RunSummary
from dist_infer.errors import DistInferError
from dist_infer.launch.world import World


@pytest.mark.ranks(2)
def test_ranks_with_other_options_are_named(world: World) -> None:
    """Each rank has read its command line, and maybe a file, itself."""
    prompts = RunOptions(prompts=("x",), seed=4)
    assert agree_on_options(prompts, world, seed=4 if world.rank == 0 else None) == 4
    other = replace(prompts, max_num_seqs=65 if world.rank else 64)
    with pytest.raises(DistInferError, match="rank 1 on host .* has other options than rank 0"):
        agree_on_options(other, world, seed=4)


@pytest.mark.ranks(2)
def test_ranks_with_other_libraries_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, shard = SimpleNamespace(kernel_orders={}), SimpleNamespace()
    lines = ["linear: torch", "sample: torch; triton rejected (missing)"]

    def agree() -> None:
        monkeypatch.setattr("dist_infer.cli.serving.kernel_choices", lambda plan, shard: tuple(lines))
        agree_on_kernels(plan, shard, world)  # type: ignore[arg-type]

    agree()
    if world.rank:
        lines[0] = "linear: triton"  # each rank has its own shapes of these
    agree()
    if world.rank:
        lines[1] = "sample: triton"
    with pytest.raises(DistInferError, match=r"rank 1 on host .* rank 0 \(sample: triton, against sample: torch; tri"):
        agree()


def test_a_rank_that_cannot_report_still_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in the exchange before the farewell."""

    class Voters:
        errors: ClassVar[list[BaseException | None]] = []

        def vote(self, stage: str, error: BaseException | None, report: dict[str, object]) -> list[dict[str, object]]:
            self.errors.append(error)
            return [report]

    def fail(*_: object) -> dict[str, object]:
        raise RuntimeError("no counters")

    monkeypatch.setattr("dist_infer.cli.serving._describe_rank", fail)
    gather_reports(Voters(), None, RunSummary(None))  # type: ignore[arg-type]
    assert Voters.errors == [], "nobody asks for a summary"
    gather_reports(Voters(), None, RunSummary("out.json", writes=False))  # type: ignore[arg-type]
    assert str(Voters.errors[0]) == "no counters"
