"""`dist-infer tune`: refused where there is no choice, and what it writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_infer.cli.tuning import _tune, _write
from dist_infer.comm.all_reduce_table import table_source
from dist_infer.comm.strategy import Strategy
from dist_infer.errors import ExitCode
from dist_infer.launch import mpirun
from dist_infer.launch.failure import VotedError
from dist_infer.launch.world import World

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")


def test_the_command_says_where_there_is_a_choice() -> None:
    command = [sys.executable, "-m", "dist_infer", "tune", "--hidden", "64", "--max-tokens", "1"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=mpirun.scrub(os.environ))
    assert found.returncode == ExitCode.USAGE and not found.stdout
    assert found.stderr.count("\n") == 1
    assert "several ranks with a GPU each: mpirun -n 2 dist-infer tune" in found.stderr


def test_one_rank_has_no_choice() -> None:
    with World.open(device="cpu", env={}) as world, pytest.raises(VotedError, match="several ranks with a GPU each"):
        _tune((64,), 1, None, world)


@two_gpus
@pytest.mark.gpu
@pytest.mark.ranks(2, timeout=170)
def test_a_table_is_measured(world: World, tmp_path: Path) -> None:
    output = tmp_path / "table.py"
    assert _tune((2048,), 16, output, world) == 0
    if world.rank == 0:
        names: dict[str, dict[tuple[str, int, str, int], tuple[tuple[int, Strategy], ...]]] = {}
        exec(output.read_text(), names)
        measured = {key[2:]: steps[-1][0] for key, steps in names["TABLE"].items() if key[3] == 2048}
        assert measured == {("none", 2048): 16, ("norm", 2048): 16, ("quant", 2048): 16}


def test_the_table_goes_to_a_file_or_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table_source({("gpu", 2, "none", 64): ((1, Strategy.ONE_SHOT),)})
    _write(text, None)
    _write(text, tmp_path / "table.py")
    assert capsys.readouterr().out == text == (tmp_path / "table.py").read_text()
