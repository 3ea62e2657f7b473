"""A shard from folder to filled model, and what is refused before anything large is made."""

import json
from pathlib import Path

import pytest
import torch

from dist_infer.checkpoint.folder import ModelFolder, open_model_folder
from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import Mesh
from dist_infer.errors import CheckpointError, UsageError
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.shard import ShardPlan, load_shard, max_model_len, num_kv_blocks, plan_shard
from tests.fake_collectives import run_mesh
from tests.tiny_families import make_tiny
from tests.tiny_models import make_tiny_llama, safetensors_torch

CPU = torch.device("cpu")


def plan(folder: Path, *, world: int = 1, rank: int = 0, dtype: str = "auto") -> ShardPlan:
    return plan_shard(open_model_folder(folder), Mesh.create(world=world, rank=rank), dtype=dtype, device=CPU)


def test_a_cpu_computes_in_float32_unless_told(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, 4, 2, dtype=torch.bfloat16)
    assert plan(folder).dtype == torch.float32
    assert plan(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_a_cache_of_e4m3_is_for_latents_alone(tmp_path: Path) -> None:
    mesh = Mesh.create(world=1, rank=0)
    latent = open_model_folder(make_tiny(tmp_path / "latent", "deepseek-v2-lite", seed=3))
    by_head = open_model_folder(make_tiny_llama(tmp_path / "by head", 4, 2))

    def planned(folder: ModelFolder, cache: str, dtype: str = "float32") -> torch.dtype:
        return plan_shard(folder, mesh, dtype=dtype, device=CPU, kv_cache_dtype=cache).cache_dtype

    assert planned(latent, "fp8") == torch.float8_e4m3fn
    assert planned(latent, "auto") == torch.float32
    assert planned(by_head, "bf16", "bfloat16") == torch.bfloat16
    with pytest.raises(UsageError, match="LlamaForCausalLM caches keys and values by head"):
        planned(by_head, "fp8")
    with pytest.raises(UsageError, match="activations are float32 here.* give --dtype bfloat16 too"):
        planned(latent, "bf16")


def test_heads_that_cannot_be_dealt_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, 4, 2)
    assert [len(plan(folder, world=3, rank=rank).heads.heads) for rank in range(3)] == [1, 1, 2]
    with pytest.raises(UsageError, match=r"5.*4"):
        plan(folder, world=5)


@pytest.mark.parametrize("tie", [True, False])
def test_a_filled_shard_knows_its_size(tmp_path: Path, tie: bool) -> None:
    folder = make_tiny_llama(tmp_path, 4, 2, tie=tie, dtype=torch.float32)
    named: list[str] = []
    shard = load_shard(plan(folder), SingleCollectives(), on_tensor=named.append)
    head = shard.model.head.weight
    copied = head.nbytes if tie and head.is_mkldnn else 0
    assert (shard.parameter_bytes, shard.copied_bytes) == (shard.model_bytes + copied, copied)
    assert ("lm_head.weight" in named) is not tie
    assert len(named) == len(set(named)) == 2 + 9 * 3 + (not tie)


@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_a_quantised_shard_is_smaller(tmp_path: Path, weight_format: WeightFormat) -> None:
    """The linear layers of 32 inputs and more; those whose width doesn't fit stay as they are."""
    folder = make_tiny_llama(tmp_path, 4, 2, dtype=torch.float32)
    shard = load_shard(plan(folder), SingleCollectives(), weight_format=weight_format, on_tensor=lambda _: None)
    stays = weight_format is WeightFormat.FP8_BLOCK
    assert (shard.parameter_bytes == shard.model_bytes) is stays
    assert shard.parameter_bytes > shard.model_bytes // 9


def test_a_shard_with_experts_knows_its_size(tmp_path: Path) -> None:
    """Every rank holds its own experts and nothing of the others'; routers stay in float32 whatever the dtype."""
    folder = make_tiny(tmp_path, "mixtral", num_local_experts=4)
    model_plan = plan(folder, dtype="float16")
    whole = load_shard(model_plan, SingleCollectives(), on_tensor=lambda _: None)
    assert whole.parameter_bytes == whole.model_bytes
    wide = sum(slot.into.nbytes for slot in whole.model.weight_slots() if slot.into.dtype == torch.float32)
    assert wide == 3 * 4 * 32 * 4
    expert_bytes = sum(slot.into.nbytes for slot in whole.model.weight_slots() if ".experts." in slot.name)

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> int:
        part = plan_shard(open_model_folder(folder), mesh, dtype="float16", device=CPU)
        shard = load_shard(part, tp, world=world, on_tensor=lambda _: None)
        assert shard.model_bytes == whole.model_bytes
        return shard.parameter_bytes

    for held in run_mesh(2, main, dp=2):
        assert held == whole.parameter_bytes - expert_bytes // 2


def test_a_rank_without_an_expert_is_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "mixtral", num_local_experts=3)
    with pytest.raises(UsageError, match="--ep 4 leaves ranks without an expert: the model has 3; .* --ep 2"):
        plan(folder, world=4)


def test_random_weights_need_only_the_geometry(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, 4, 2)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="safetensors"):
        open_model_folder(folder)
    mesh = Mesh.create(world=1, rank=0)
    dummy_plan = plan_shard(open_model_folder(folder, weights=False), mesh, dtype="float64", device=CPU)
    first, second = (
        load_shard(dummy_plan, SingleCollectives(), dummy_seed=seed, on_tensor=lambda _: None).model.layers[0]
        for seed in (0, 1)
    )
    pairs = zip(first.weight_slots(""), second.weight_slots(""), strict=True)
    assert all(not torch.equal(a.into, b.into) for a, b in pairs)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, 4, 2)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\."):
        load_shard(plan(folder), SingleCollectives(), on_tensor=lambda _: None)


def test_sequences_are_as_long_as_model_and_cache_allow(tmp_path: Path) -> None:
    config = plan(make_tiny_llama(tmp_path, 4, 2, max_position_embeddings=512)).config
    assert max_model_len(config, None, num_kv_tokens=10_000) == 512
    assert max_model_len(config, None, num_kv_tokens=100) == 100
    assert max_model_len(config, 100, num_kv_tokens=100) == 100
    with pytest.raises(UsageError, match=r"300.*100.*--num-kv-blocks"):
        max_model_len(config, 300, num_kv_tokens=100)
    with pytest.raises(UsageError, match=r"513.*512"):
        max_model_len(config, 513, num_kv_tokens=100)


def test_sequences_end_at_the_window_unless_asked_otherwise(tmp_path: Path) -> None:
    folder = open_model_folder(make_tiny(tmp_path / "all", "mistral", sliding_window=64))
    some = open_model_folder(
        make_tiny(tmp_path / "some", "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=2)
    )
    mesh = Mesh.create(world=1, rank=0)

    def planned(model: ModelFolder, asked: int | None) -> tuple[int, int | None]:
        config = plan_shard(model, mesh, dtype="auto", device=CPU, max_model_len=asked).config
        return max_model_len(config, asked, num_kv_tokens=10_000), config.sliding_window

    assert [planned(folder, asked) for asked in (None, 40, 64, 65)] == [(64, None), (40, None), (64, None), (65, 64)]
    assert [planned(some, asked) for asked in (None, 64)] == [(64, None)] * 2
    with pytest.raises(UsageError, match="65 is more than the sliding window of 64 tokens, which only some layers"):
        planned(some, 65)


@pytest.mark.parametrize("tie", [True, False])
def test_a_vocabulary_may_be_padded(tmp_path: Path, tie: bool) -> None:
    """With more rows in the file than config.json says, and more of those than the tokenizer has ids."""
    plain = make_tiny_llama(tmp_path / "plain", 4, 2, tie=tie)
    padded = make_tiny_llama(tmp_path / "padded", 4, 2, tie=tie)
    tensors = safetensors_torch.load_file(padded / "model.safetensors")
    for name in ("model.embed_tokens.weight", *([] if tie else ["lm_head.weight"])):
        tensors[name] = torch.cat([tensors[name], torch.full((5, 32), torch.nan, dtype=torch.float64)])
    safetensors_torch.save_file(tensors, padded / "model.safetensors", metadata={"format": "pt"})
    (padded / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 99}}}))
    shards = [
        load_shard(plan(folder, dtype="float64"), SingleCollectives(), on_tensor=lambda _: None)
        for folder in (plain, padded)
    ]
    for one, other in zip(*(shard.model.weight_slots() for shard in shards), strict=True):
        assert torch.equal(one.into, other.into)
    assert [plan(folder).config.num_sampled_ids for folder in (plain, padded)] == [131, 100]


def test_kv_blocks_by_memory(tmp_path: Path) -> None:
    shard_plan = plan(make_tiny_llama(tmp_path, 4, 2))
    few = num_kv_blocks(shard_plan, block_size=16, memory_fraction=0.01, sharers=4)
    many = num_kv_blocks(shard_plan, block_size=16, memory_fraction=0.01, sharers=1)
    assert 3 < many / few < 5
