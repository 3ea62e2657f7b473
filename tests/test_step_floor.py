"""The bytes of a step against the tensors of a loaded model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.shard import Shard, ShardPlan, load_shard, plan_shard
from dist_infer.step_floor import StepFloor, read_speed, routed_parameters
from tests.tiny_families import make_tiny
from tests.tiny_models import make_tiny_llama, safetensors_torch

CPU = torch.device("cpu")


def load(folder: Path) -> tuple[ShardPlan, Shard]:
    mesh = Mesh.create(world=1, rank=0)
    plan = plan_shard(open_model_folder(folder, weights=False), mesh, dtype="bfloat16", device=CPU)
    return plan, load_shard(plan, SingleCollectives(), dummy_seed=0, on_tensor=lambda _: None)


def counts(folder: Path) -> dict[str, int]:
    """Of the checkpoint's tensors."""
    return {name: tensor.numel() for name, tensor in safetensors_torch.load_file(folder / "model.safetensors").items()}


def test_all_but_the_embedding_is_read_once(tmp_path: Path) -> None:
    plan, shard = load(make_tiny_llama(tmp_path, 4, 2))
    config = plan.config
    assert not config.tie_word_embeddings
    floor = StepFloor.of(plan, shard)
    numbers = sum(count for name, count in counts(tmp_path).items() if "embed_tokens" not in name)
    assert floor.read_bytes(num_tokens=9, kv_tokens=0) == 2 * numbers
    kv_numbers = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    assert floor.read_bytes(num_tokens=9, kv_tokens=5) == 2 * (numbers + 5 * kv_numbers)
    tied = replace(plan, config=replace(config, tie_word_embeddings=True))
    assert StepFloor.of(tied, shard).dense_bytes == shard.parameter_bytes


def test_experts_are_read_as_far_as_tokens_hit_them(tmp_path: Path) -> None:
    plan, shard = load(make_tiny(tmp_path, "qwen3-moe"))
    moe = plan.config.moe
    assert moe is not None
    experts = sum(count for name, count in counts(tmp_path).items() if ".experts." in name)
    assert routed_parameters(plan.config) == experts
    floor = StepFloor.of(plan, shard)
    assert floor.expert_bytes == 2 * experts
    share = moe.top_k / moe.num_experts
    assert [floor.share_hit(count) for count in (0, 1, 2)] == pytest.approx([0, share, 1 - (1 - share) ** 2])
    apart = floor.read_bytes(num_tokens=1, kv_tokens=0) - floor.read_bytes(num_tokens=0, kv_tokens=0)
    assert apart == pytest.approx(2 * experts * share)


def test_experts_are_dealt_to_all_ranks(tmp_path: Path) -> None:
    plan, shard = load(make_tiny(tmp_path, "qwen3-moe"))
    halves = StepFloor.of(replace(plan, mesh=Mesh.create(world=2, rank=1, dp=2)), shard)
    assert halves.expert_bytes * 2 == StepFloor.of(plan, shard).expert_bytes


def test_nobody_knows_the_memory_of_a_cpu() -> None:
    assert read_speed(CPU) is None
