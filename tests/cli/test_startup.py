"""The stages of a start, in a world of one rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_infer.cli.environment import Environment
from dist_infer.cli.options import EngineOptions
from dist_infer.cli.startup import agree_on_limits, load_model, make_step_runner, plan_model
from dist_infer.launch.world import World
from dist_infer.types import Batch
from tests.tiny_models import make_tiny_llama


@pytest.fixture
def world() -> Iterator[World]:
    with World.open(device="cpu", env={}) as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("startup"), 4, 2)


def test_the_stages_make_a_runner(world: World, model: Path) -> None:
    options = EngineOptions(model=str(model), num_kv_blocks=5, block_size=8, max_num_seqs=3)
    plan = plan_model(options, Environment(launcher=None, cache_dir=model), world)
    shard = load_model(options, plan, world, dummy_seed=0)
    config = agree_on_limits(options, plan, shard, world)
    assert (config.num_kv_blocks, config.max_model_len, config.depth) == (5, 40, 0)
    step_runner = make_step_runner(options, plan, shard, config, world)
    assert step_runner.prepare(Batch.dummy()).batch.num_tokens == 1
