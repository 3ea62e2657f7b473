"""Which graph a batch takes, and that a padded replay gives the tokens of an eager step, whatever the company."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_infer.comm.agreement import EAGER
from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import Mesh, split_heads
from dist_infer.config import SchedulerConfig
from dist_infer.graphs import DecodeGraphs, default_sizes
from dist_infer.kv_cache import KVCache
from dist_infer.models.registry import build_model, parse_config
from dist_infer.runner import Runner
from dist_infer.sampler import Sampler
from dist_infer.step_runner import StepRunner
from dist_infer.types import BatchKind, Request, SamplingParams
from tests.fake_collectives import run_mesh
from tests.fake_graphs import Recorder, make_graph_runner
from tests.step_loop import StepLoop
from tests.tiny_families import make_tiny
from tests.tiny_models import fill, load_tiny_model, make_tiny_llama, read_config, safetensors_torch

CPU = torch.device("cpu")
CONFIG = SchedulerConfig(
    max_model_len=96, max_num_seqs=5, max_num_tokens=24, block_size=4, num_kv_blocks=60, prefix_cache=True, depth=1
)
BASE = [(7 * i * i + 3 * i + 1) % 131 for i in range(60)]


def test_the_smallest_graph_that_fits() -> None:
    graphs = DecodeGraphs([8, 1, 4, 4])
    assert graphs.sizes == (1, 4, 8)
    assert [graphs.bucket(rows) for rows in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]


def test_one_warning_for_batches_that_are_too_large(caplog: pytest.LogCaptureFixture) -> None:
    graphs = DecodeGraphs([2])
    with caplog.at_level(logging.WARNING):
        assert [graphs.bucket(3), graphs.bucket(4), graphs.bucket(2)] == [EAGER, EAGER, 2]
    assert [record.getMessage()[:52] for record in caplog.records] == [
        "a batch of 3 sequences is larger than the largest gr"
    ]


@pytest.mark.parametrize("sizes", [[], [0, 4]])
def test_sizes_are_checked(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DecodeGraphs(sizes)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 64, 100, 128, 256, 257, 300])
def test_default_sizes_end_with_the_maximum(largest: int) -> None:
    sizes = default_sizes(largest)
    assert sizes[0] == 1 and sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    graphs = DecodeGraphs(sizes)
    assert all(graphs.bucket(rows) - rows < max(8, rows / 2) for rows in range(1, largest + 1))


def test_capture_goes_down_and_happens_once() -> None:
    order: list[tuple[int, str]] = []
    done: list[int] = []

    def parts(size: int) -> dict[str, Callable[[], object]]:
        return {"a": lambda: order.append((size, "a")), "b": lambda: order.append((size, "b"))}

    graphs = DecodeGraphs([1, 2])
    graphs.capture(parts, Recorder(), on_size=done.append)
    assert order == [(2, "a"), (2, "b"), (1, "a"), (1, "b")]
    assert done == [2, 1]
    graphs.replay(1, "b")
    assert order[4:] == [(1, "b")]
    with pytest.raises(RuntimeError, match="captured once"):
        graphs.capture(parts, Recorder())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("graphs")
    families = ("qwen3-moe", "deepseek-v2-lite")
    return {
        "llama": make_tiny_llama(root / "llama", 4, 2),
        **{family: make_tiny(root / family, family) for family in families},
    }


def serve(folder: Path, requests: list[Request], recorder: Recorder | None = None, **changes: Any) -> StepLoop:
    """All requests on one rank in float64, with graphs of 1, 2 and 5 rows or without."""
    model = load_tiny_model(folder, dtype=torch.float64, device="cpu")
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    kv_cache = KVCache(model.config, shard, CONFIG.num_kv_blocks, CONFIG.block_size, torch.float64, CPU)
    tp = SingleCollectives()
    sampler = Sampler.choosing(tp, model.vocab_range, model.config.vocab_size, device=CPU, dtype=torch.float64)
    if recorder is None:
        step_runner = StepRunner(Runner(model, kv_cache, max_num_seqs=5, device=CPU), sampler)
    else:
        step_runner = make_graph_runner(
            model, kv_cache, sampler, max_num_seqs=5, sizes=(1, 2, 5), recorder=recorder, **changes
        )
    loop = StepLoop(step_runner, CONFIG)
    loop.serve(requests)
    return loop


def make_requests(*samplings: dict[str, Any]) -> list[Request]:
    """Prompts of other lengths, most with a common beginning, and answers of other lengths: batches grow and shrink."""
    lengths = [41, 7, 8, 30, 1, 40, 3]
    return [
        Request(
            request_id=idx,
            prompt_ids=tuple(BASE[:length] if idx % 2 else [*BASE[: length - 1], idx]),
            sampling=SamplingParams(**{"max_tokens": 3 + 4 * idx, "seed": idx, **samplings[idx % len(samplings)]}),
        )
        for idx, length in enumerate(lengths)
    ]


GREEDY, NOISY = {"temperature": 0.0}, {"temperature": 0.9}
FILTERED = {"temperature": 1.1, "top_k": 9, "top_p": 0.9}, {"top_k": 1}, {"min_p": 0.1}, {"top_p": 0.5}
RARE = {"presence_penalty": 0.5}, {"logprobs": 2, "top_k": 9}, {"logit_bias": ((5, 4.0),), "top_p": 0.9}


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v2-lite"])
@pytest.mark.parametrize("samplings", [(GREEDY, NOISY), (*FILTERED, NOISY)], ids=["plain", "filtered"])
def test_replayed_steps_give_the_tokens_of_eager_ones(
    folders: dict[str, Path], family: str, samplings: tuple[dict[str, Any], ...]
) -> None:
    recorder = Recorder()
    requests = make_requests(*samplings)
    replayed = serve(folders[family], requests, recorder)
    assert replayed.tokens == serve(folders[family], requests).tokens
    assert recorder.num_captured == 3 * 3
    assert recorder.num_replayed == 2 * replayed.kinds.count(BatchKind.DECODE)
    assert BatchKind.EXTEND in replayed.kinds and BatchKind.DECODE in replayed.kinds


def test_rare_ways_take_the_forward_graph_only(folders: dict[str, Path]) -> None:
    recorder = Recorder()
    requests = make_requests(*RARE)
    replayed = serve(folders["llama"], requests, recorder)
    assert replayed.tokens == serve(folders["llama"], requests).tokens
    assert 0 < recorder.num_replayed < 2 * replayed.kinds.count(BatchKind.DECODE)


def test_tokens_do_not_depend_on_company(folders: dict[str, Path]) -> None:
    """Alone in a graph of one row, or padded among others."""
    requests = make_requests(NOISY)
    together = serve(folders["llama"], requests, Recorder()).tokens
    for request in requests[:3]:
        assert serve(folders["llama"], [request], Recorder()).tokens == {
            request.request_id: together[request.request_id]
        }


@pytest.mark.parametrize(("world", "dp"), [(2, 2), (2, 1), (4, 2)])
def test_ranks_replay_one_size_or_all_go_eager(folders: dict[str, Path], world: int, dp: int) -> None:
    """Groups that prefill, decode and idle at different times; those without tokens replay a dummy."""
    folder, requests = folders["qwen3-moe"], make_requests(GREEDY, NOISY)
    expected = serve(folder, requests).tokens
    arrivals = {0: [requests[:2], requests[2:4]], 5: [requests[4:5], []], 30: [requests[5:], []]}

    def main(mesh: Mesh, everybody: Collectives, tp: Collectives) -> tuple[dict[int, list[int]], list[int]]:
        step_runner = make_rank(folder, mesh, everybody, tp)
        loop = StepLoop(step_runner, CONFIG)
        buckets = []
        for step in range(60):
            waiting = arrivals.get(step, [[], []])
            if dp == 2:
                loop.admit(waiting[mesh.dp_rank])
            else:
                loop.admit([*waiting[0], *waiting[1]])
            decision = loop.step_with(mesh, everybody.all_gather)
            buckets.append(decision.graph_bucket)
        return loop.tokens, buckets

    results = run_mesh(world, main, dp=dp)
    assert all(buckets == results[0][1] for _, buckets in results)
    assert set(results[0][1]) >= {EAGER, 1, 2}
    for rank, (tokens, _) in enumerate(results):
        group = rank * dp // world
        assert tokens == {key: expected[key] for key in tokens}
        assert len(tokens) == (7 if dp == 1 else (5, 2)[group])


def make_rank(folder: Path, mesh: Mesh, everybody: Collectives, tp: Collectives) -> StepRunner:
    model = build_model(
        parse_config(read_config(folder)), tp=tp, dtype=torch.float64, device=CPU, mesh=mesh, world=everybody
    )
    fill(model, safetensors_torch.load_file(folder / "model.safetensors"))
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, mesh.tp, mesh.tp_rank)
    kv_cache = KVCache(model.config, shard, CONFIG.num_kv_blocks, CONFIG.block_size, torch.float64, CPU)
    sampler = Sampler(tp, model.vocab_range, model.config.vocab_size)
    return make_graph_runner(model, kv_cache, sampler, max_num_seqs=5, sizes=(1, 2, 5), recorder=Recorder())
