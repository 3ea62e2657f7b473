"""Steps before a rank is ready: of the right sizes, and without a trace in the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.comm.mesh import split_heads
from dist_infer.config import SchedulerConfig
from dist_infer.kv_cache import KVCache
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.scheduler import batch_digest
from dist_infer.step_runner import StepRunner
from dist_infer.types import BatchKind
from dist_infer.warmup import largest_batch, make_batch, mixed_batch, small_batches, warm_up
from tests.fake_graphs import Recorder, make_graph_runner
from tests.tiny_models import load_tiny_model, make_tiny_llama

CPU = torch.device("cpu")


def limits(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_tokens": 32,
        "block_size": 4,
        "num_kv_blocks": 1,
    }
    return SchedulerConfig(**(values | changes))


LIMITS = [
    limits(),
    limits(max_num_seqs=1),
    limits(max_num_tokens=1),
    limits(max_model_len=2),
    limits(max_num_tokens=100, max_model_len=20),
    limits(max_num_seqs=50),
]


@pytest.mark.parametrize("config", LIMITS)
def test_no_step_passes_the_limits(config: SchedulerConfig) -> None:
    for batch in (largest_batch(config), mixed_batch(config), *small_batches(config)):
        assert 0 < batch.num_tokens <= config.max_num_tokens
        assert 0 < batch.num_seqs <= config.max_num_seqs
        assert int(batch.kv_lens.max()) <= config.max_model_len
        assert (batch.kv_lens >= batch.query_start[1:] - batch.query_start[:-1]).all()
        assert (batch.slots == -1).all() and (batch.state_rows == -1).all()


def test_the_largest_step_is_full() -> None:
    batch = largest_batch(limits())
    assert (batch.num_tokens, batch.num_seqs, batch.kv_lens.tolist()) == (32, 4, [64] * 4)
    assert (batch.top_p < 1).all()
    mixed = mixed_batch(limits())
    assert (mixed.num_tokens, mixed.num_seqs, mixed.kind) == (32, 2, BatchKind.PREFILL)


def test_kinds() -> None:
    kinds = [make_batch([part], block_size=4).kind for part in ((3, 3), (3, 8), (1, 8), (1, 1))]
    assert kinds == [BatchKind.PREFILL, BatchKind.EXTEND, BatchKind.DECODE, BatchKind.PREFILL]
    assert make_batch([(1, 8), (2, 9)], block_size=4).positions.tolist() == [7, 7, 8]


def test_small_steps_have_sizes_of_all_kinds() -> None:
    batches = list(small_batches(limits(max_num_tokens=64, max_num_seqs=32)))
    assert {batch.num_tokens for batch in batches} >= {1, 3, 16}
    assert {batch.kind for batch in batches} == {BatchKind.PREFILL, BatchKind.EXTEND, BatchKind.DECODE}
    assert len({batch_digest(batch) for batch in batches}) == len(batches)


@pytest.mark.parametrize("max_model_len", [100, 512])
def test_prompts_of_four_sizes_between_powers_of_two(max_model_len: int) -> None:
    batches = small_batches(limits(max_num_tokens=300, max_model_len=max_model_len))
    prompts = {batch.num_tokens for batch in batches if batch.kind is BatchKind.PREFILL}
    assert prompts >= {1, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256}
    assert max(prompts) <= 300


def test_numbers_of_sequences_of_every_power_of_two() -> None:
    batches = list(small_batches(limits(max_num_seqs=35, max_num_tokens=64, num_kv_blocks=32)))
    assert {batch.num_seqs for batch in batches if batch.kind is BatchKind.EXTEND} >= {1, 2, 4, 8, 16, 32}
    decodes = [batch for batch in batches if batch.kind is BatchKind.DECODE]
    longest = {(batch.num_seqs, int(batch.kv_lens[0])) for batch in decodes}
    assert longest >= {(1, 64), (2, 64), (4, 32), (8, 16), (16, 8), (32, 4)}


def test_logits_are_edited_in_every_way_of_sampling() -> None:
    ways = [
        list(zip(batch.temperature, batch.top_k, batch.top_p, strict=True))
        for batch in small_batches(limits())
        if batch.edits is not None
    ]
    assert ways == [[(0, 0, 1), (1, 0, 1), (1, 5, 0.9), (1, 0, 0.9)], [(0, 0, 1), (1, 0, 1)] * 2]


@pytest.mark.parametrize("with_graphs", [False, True])
def test_nothing_is_left_behind(tmp_path: Path, with_graphs: bool) -> None:
    config = limits()
    model = load_tiny_model(make_tiny_llama(tmp_path, 4, 2), dtype=torch.float64, device="cpu")
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    kv_cache = KVCache(model.config, shard, 16, config.block_size, torch.float64, CPU)
    sampler = Sampler(SingleCollectives(), model.vocab_range, model.config.vocab_size)
    recorder, heard = Recorder(), list[str]()
    if with_graphs:
        step_runner = make_graph_runner(model, kv_cache, sampler, max_num_seqs=4, sizes=(1, 4), recorder=recorder)
    else:
        step_runner = StepRunner(Runner(model, kv_cache, max_num_seqs=4, device=CPU), sampler)
    warm_up(step_runner, config, world_size=1, on_progress=heard.append)
    assert all(not tensor.any() for layer in kv_cache.layers for tensor in layer.tensors)
    assert heard[-1] == "mixed step"
    assert (recorder.num_replayed > 0) is with_graphs
