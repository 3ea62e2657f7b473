"""What `dist-infer tune attention` keeps, and what a job makes of it."""

import logging
from pathlib import Path

import pytest
import torch

from dist_infer.cli import kernel_tuning
from dist_infer.cli.environment import Environment
from dist_infer.cli.kernel_tuning import _tune, read_tuned
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.tune import to_json
from dist_infer.launch.failure import VotedError
from dist_infer.launch.world import World

ENTRY = Measured(
    device="cpu", op="mla_attention.generation", library="reference", sizes={"heads": range(16, 17)}, figures="f"
)


def write(folder: Path, text: str) -> None:
    (folder / "tuned-attention.json").write_text(text)


@pytest.mark.ranks(2)
def test_all_ranks_take_what_rank_0_has_read(world: World, tmp_path: Path) -> None:
    other = Measured(device="cpu", op="o", library="l", sizes={}, figures=f"of rank {world.rank}")
    write(tmp_path, to_json([other], kernel_tuning._versions()))
    assert [entry.figures for entry in read_tuned(tmp_path, world)] == ["of rank 0"]


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
    with World.open(device="cpu", env={}) as world, pytest.raises(VotedError, match="on a GPU only"):
        _tune((16,), environment, world)


@pytest.mark.gpu
def test_later_jobs_find_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment = Environment(launcher=None, cache_dir=tmp_path)
    with World.open(device="cuda", env={}) as world:
        write(tmp_path, to_json([ENTRY], kernel_tuning._versions()))
        assert _tune((16,), environment, world) == 0
        found = read_tuned(tmp_path, world)
    assert {entry.device for entry in found} == {"cpu", torch.cuda.get_device_name()}
