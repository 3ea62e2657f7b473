"""What `dist-infer tune attention` keeps, and what a job makes of it."""

import logging
from pathlib import Path

import pytest
import torch

from dist_infer.cli import kernel_tuning
from dist_infer.cli.environment import Environment
from dist_infer.cli.kernel_tuning import _tune, attention_of, experts_of, read_tuned
from dist_infer.kernels import tune, tune_moe
from dist_infer.kernels.measured import Measured, exactly
from dist_infer.kernels.tune import to_json
from dist_infer.kernels.tune_moe import Layer
from dist_infer.launch.failure import VotedError
from dist_infer.launch.world import World

LAYER = Layer(8, 2, 128, 128)
ENTRY = Measured(
    device="cpu", op="mla_attention.generation", library="reference", sizes={"heads": range(16, 17)}, figures="f"
)


def write(folder: Path, text: str, kind: str = "attention") -> None:
    (folder / f"tuned-{kind}.json").write_text(text)


@pytest.mark.ranks(2)
def test_all_ranks_take_what_rank_0_has_read(world: World, tmp_path: Path) -> None:
    other = Measured(device="cpu", op="o", library="l", sizes={}, figures=f"of rank {world.rank}")
    for kind in ("attention", "moe"):
        write(tmp_path, to_json([other], kernel_tuning._versions()), kind)
    assert [entry.figures for entry in read_tuned(tmp_path, world)] == 2 * ["of rank 0"]


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "Expecting property name"), (to_json([ENTRY], {"torch": "0"}), "it was made with")]
)
def test_a_file_that_can_not_be_used_is_told_and_left(
    tmp_path: Path, text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with World.open(device="cpu", env={}) as world, caplog.at_level(logging.WARNING):
        assert read_tuned(tmp_path, world) == [] and caplog.text == ""
        write(tmp_path, text)
        assert read_tuned(tmp_path, world) == []
    assert reason in caplog.text and "run `dist-infer tune attention` again" in caplog.text


def test_there_is_a_choice_on_a_gpu_only(tmp_path: Path) -> None:
    environment = Environment(launcher=None, cache_dir=tmp_path)
    with World.open(device="cpu", env={}) as world:
        for tuning in (attention_of((16,)), experts_of((LAYER,))):
            with pytest.raises(VotedError, match="on a GPU only"):
                _tune(tuning, environment, world)


def test_only_what_was_measured_anew_is_replaced() -> None:
    def entry(device: str, experts: int, pairs: range) -> Measured:
        sizes = {"experts": experts, "width": 128, "intermediate": 128}
        ranges = {**exactly(sizes), "pairs": pairs}
        return Measured(device=device, op="moe_experts", library="l", sizes=ranges, figures="f")

    replaced = [
        kernel_tuning._is_replaced(entry(*which), "dev", experts_of((LAYER,)))
        for which in (("dev", 8, range(1, 3)), ("dev", 8, range(3, 5)), ("dev", 4, range(1, 3)), ("a", 8, range(1, 3)))
    ]
    assert replaced == [True, True, False, False]


@pytest.mark.gpu
def test_later_jobs_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tune_moe, "MAX_PAIRS", 4)
    monkeypatch.setattr(tune, "NUM_SEQS", (1,))
    environment = Environment(launcher=None, cache_dir=tmp_path)
    with World.open(device="cuda", env={}) as world:
        write(tmp_path, to_json([ENTRY], kernel_tuning._versions()))
        assert _tune(attention_of((16,)), environment, world) == 0
        assert _tune(experts_of((LAYER,)), environment, world) == 0
        found = read_tuned(tmp_path, world)
    assert {entry.device for entry in found} == {"cpu", torch.cuda.get_device_name()}
    assert {entry.op for entry in found} == {"mla_attention.generation", "moe_experts"}
