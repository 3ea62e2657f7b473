"""Size and shape of the paged cache."""

import dataclasses
from pathlib import Path

import pytest
import torch

from dist_infer.comm.mesh import split_heads
from dist_infer.config import MlaConfig, ModelConfig, RopeConfig
from dist_infer.errors import UsageError
from dist_infer.kernels.reference.quantize import to_e4m3
from dist_infer.kv_cache import KVCache, block_bytes, num_blocks_for
from dist_infer.layers.mla import LatentLayer
from dist_infer.runner import Runner
from tests.batches import Part, make_batch
from tests.tiny_families import make_tiny
from tests.tiny_models import load_tiny_model

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=72,
    intermediate_size=8,
    num_layers=5,
    num_heads=9,
    num_kv_heads=3,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp_size", "tp_rank", "num_kv_heads"), [(1, 0, 3), (2, 0, 2), (2, 1, 1), (4, 1, 1)])
def test_bytes_are_what_is_allocated(dtype: torch.dtype, tp_size: int, tp_rank: int, num_kv_heads: int) -> None:
    shard = split_heads(CONFIG.num_heads, CONFIG.num_kv_heads, tp_size, tp_rank)
    cache = KVCache(CONFIG, shard, 7, 4, dtype, CPU)
    assert len(cache.layers) == 5
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors]
    assert all(tensor.shape == (28, num_kv_heads, 16) and tensor.dtype == dtype for tensor in tensors)
    assert not any(bool(tensor.any()) for tensor in tensors)
    assert len({tensor.data_ptr() for tensor in tensors}) == 10
    assert cache.num_bytes == sum(tensor.nbytes for tensor in tensors) == 7 * block_bytes(CONFIG, shard, 4, dtype)


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 1), (4, 3)])
def test_latents_are_held_whole_by_every_rank(tp_size: int, tp_rank: int) -> None:
    mla = MlaConfig(q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    config = dataclasses.replace(CONFIG, num_heads=4, num_kv_heads=4, head_dim=24, mla=mla)
    shard = split_heads(4, 4, tp_size, tp_rank)
    cache = KVCache(config, shard, 7, 4, torch.float32, CPU)
    tensors = [tensor for layer in cache.layers for tensor in layer.tensors]
    assert [tensor.shape for tensor in tensors] == [(28, 32)] * 5
    assert block_bytes(config, shard, 4, torch.float32) == 5 * 4 * 32 * 4
    assert cache.num_bytes == sum(tensor.nbytes for tensor in tensors) == 7 * 5 * 4 * 32 * 4


def test_latents_of_e4m3(tmp_path: Path) -> None:
    """A whole model: the bytes of its first layer are those of a wide cache, rounded; its logits hardly move."""
    tokens = list(range(3, 40))
    model = load_tiny_model(make_tiny(tmp_path, "deepseek-v2-lite", seed=3))
    heads = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    caches = [KVCache(model.config, heads, 7, 8, dtype, CPU) for dtype in (torch.float64, torch.float8_e4m3fn)]
    assert caches[0].num_bytes == 8 * caches[1].num_bytes
    logits = []
    for cache in caches:
        runner = Runner(model, cache, max_num_seqs=1, device=CPU)
        rows = []
        for start, stop in ((0, 20), (20, 36), (36, 37)):  # prefill, extend, decode
            part = Part(token_ids=tokens[start:stop], start=start, pages=range(7))
            rows.append(runner.run(runner.prepare(make_batch([part], block_size=8))))
        logits.append(torch.cat(rows))
    wide, narrow = (cache.layers[0] for cache in caches)
    assert isinstance(wide, LatentLayer) and isinstance(narrow, LatentLayer) and narrow.scale is not None
    assert torch.equal(narrow.latent.view(torch.uint8), to_e4m3(wide.latent.float()).view(torch.uint8))
    errors = (logits[1] - logits[0]).norm(dim=1) / logits[0].norm(dim=1)
    assert 1e-6 < errors.median().item() < 0.4


def test_blocks_for_memory() -> None:
    shard = split_heads(9, 3, 1, 0)
    page = block_bytes(CONFIG, shard, 4, torch.float32)
    assert page == 2 * 5 * 4 * 3 * 16 * 4
    assert num_blocks_for(3 * page, CONFIG, shard, 4, torch.float32) == 3
    assert num_blocks_for(3 * page - 1, CONFIG, shard, 4, torch.float32) == 2
    with pytest.raises(
        UsageError, match=r"a KV block of 4 tokens takes 0.0 MiB on this rank .* raise --kv-memory-fraction"
    ):
        num_blocks_for(page - 1, CONFIG, shard, 4, torch.float32)


def test_a_cache_that_does_not_fit_names_the_options() -> None:
    huge = dataclasses.replace(CONFIG, head_dim=1 << 30)
    with pytest.raises(
        UsageError, match=r"KV cache of 1024 blocks takes \d+ MiB, more than cpu has left: lower --num-kv"
    ):
        KVCache(huge, split_heads(9, 3, 1, 0), 1024, 16, torch.float32, CPU)
