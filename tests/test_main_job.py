"""The main job on 1 to 4 ranks: the default model against llama.cpp, tiny models against transformers in float64."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dist_infer.checkpoint.default_model import default_model_path
from dist_infer.errors import UsageError
from dist_infer.launch.world import World
from dist_infer.types import Request, SamplingParams
from tests import sampling_oracle
from tests.serving import Served, load, log_probabilities, on_rank_0

ORACLE = json.loads((Path(__file__).parent / "data" / "smollm2_oracle.json").read_text())["prompts"]
MAX_DIFFERENCE = 1e-3  # of a log probability, float32 here against float32 in llama.cpp
NUM_ALONE = 12  # tokens where each rank has a whole model: every step reads it once a rank
LAYOUTS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (1, 4), (2, 2)]}  # (tp, dp) by world size


@pytest.fixture(scope="session")
def shared_folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 0's temporary folder, for all ranks of this launch."""
    own = str(tmp_path_factory.mktemp("main-job"))
    return Path(world.vote("folder", None, {"path": own})[0]["path"])


def cache_dir() -> Path:
    """Where the converted default model is kept between launches."""
    return Path(os.environ.get("DIST_INFER_CACHE", Path.home() / ".cache" / "dist-infer"))


def needs_transformers() -> None:
    """Skip on all ranks where it is missing; only rank 0 imports it, which takes seconds."""
    if find_spec("transformers") is None:
        pytest.skip("pip: transformers is missing")


@pytest.fixture(scope="session")
def smollm2(world: World) -> Path:
    """The folder of the default model."""
    try:
        with world.watchdog.long_task("convert the model"):
            return default_model_path(cache_dir(), on_wait=lambda: world.watchdog.progress("convert the model"))
    except UsageError as error:
        pytest.skip(f"pip: {error}")


@pytest.mark.ranks(1, 2, 3, 4, timeout=150)
def test_default_model_gives_the_tokens_of_llama_cpp(world: World, smollm2: Path) -> None:
    prompts = [prompt for prompt in ORACLE if len(prompt["token_ids"]) == 30][:4]
    assert len(prompts) == 4
    for tp, dp in LAYOUTS[world.size]:
        num_tokens = NUM_ALONE if dp > 1 and tp == 1 else 30
        requests = [
            Request(
                request_id=idx,
                prompt_ids=tuple(prompt["prompt_ids"]),
                sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0),
            )
            for idx, prompt in enumerate(prompts)
        ]
        served = load(world, smollm2, tp=tp, dp=dp, dtype="float32")
        answers = served.run(requests)
        if world.rank == 0:
            for request, prompt in zip(requests, prompts, strict=True):
                tokens = answers.tokens[request.request_id]
                assert tokens == prompt["token_ids"][:num_tokens], (tp, dp, prompt["input"])
        if tp > 1 or world.size == 1:  # a rank with a whole model computes as if it were alone
            check_log_probabilities(served)


def check_log_probabilities(served: Served) -> None:
    """Of every chosen token of every prompt, the past forced to be the oracle's."""
    for prompt in ORACLE:
        token_ids = prompt["prompt_ids"] + prompt["token_ids"]
        rows = log_probabilities(served.logits(token_ids[:-1])[len(prompt["prompt_ids"]) - 1 :])
        chosen = rows.gather(1, torch.tensor(prompt["token_ids"])[:, None])[:, 0]
        difference = (chosen - torch.tensor(prompt["logprobs"], dtype=torch.float64)).abs().max().item()
        assert difference <= MAX_DIFFERENCE, prompt["input"]


@pytest.mark.ranks(1, 2, 3, 4, timeout=120)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (6, 1)])
def test_tiny_llamas_equal_the_float64_oracle(world: World, shared_folder: Path, heads: int, kv_heads: int) -> None:
    tiny_models = pytest.importorskip("tests.tiny_models")
    needs_transformers()
    folder = shared_folder / f"llama-{heads}-{kv_heads}"
    prompts = [[7, 3, 90, 11, 54], [5], list(range(20, 61))]

    def make() -> None:
        tiny_models.make_tiny_llama(folder, heads, kv_heads, attention_bias=True, seed=heads)
        oracle = tiny_models.LiftedOracle(folder)
        torch.save([oracle.greedy(prompt, 12) for prompt in prompts], folder / "expected.pt")

    on_rank_0(world, make)
    expected = torch.load(folder / "expected.pt")
    requests = [
        Request(request_id=idx, prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=12, temperature=0.0))
        for idx, prompt in enumerate(prompts)
    ]
    for idx, (tp, dp) in enumerate(LAYOUTS[world.size]):
        served = load(world, folder, tp=tp, dp=dp)
        for depth in (0, 1):
            max_num_tokens = (256, 7)[(heads + idx + depth) % 2]  # whole prompts, or chunks
            answers = served.run(requests, depth=depth, max_num_tokens=max_num_tokens, block_size=4)
            if world.rank == 0:
                assert [answers.tokens[idx] for idx in range(3)] == [tokens for tokens, _ in expected], (tp, dp)
        for prompt, (tokens, logits) in zip(prompts, expected, strict=True):
            rows = served.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
            assert (rows - logits).abs().max().item() <= 1e-9, (tp, dp)


@pytest.mark.ranks(2, 3, timeout=120)
def test_every_sampling_option_gives_what_its_formula_says(world: World, shared_folder: Path) -> None:
    """Whole prompts and chunks, depth 0 and 1, roomy and with preemptions; the same tokens in each layout."""
    tiny_models = pytest.importorskip("tests.tiny_models")
    needs_transformers()
    folder = shared_folder / "llama-sampling"
    on_rank_0(world, lambda: tiny_models.make_tiny_llama(folder, 6, 3, num_layers=2, seed=3))
    requests = sampling_oracle.numbered([*sampling_oracle.GREEDY, *sampling_oracle.SAMPLED])
    oracle = sampling_oracle.Oracle(tiny_models.LiftedOracle(folder)) if world.rank == 0 else None
    first: dict[int, list[int]] | None = None
    for tp, dp in [(world.size, 1), (1, world.size)]:
        served = load(world, folder, tp=tp, dp=dp)
        for depth, limits in (
            (0, {}),
            (1, {"max_num_tokens": 16}),
            (1, {"max_num_tokens": 19, "num_kv_blocks": 16, "block_size": 4}),
        ):
            answers = served.run(requests, depth=depth, **limits)
            if oracle is not None:
                sampling_oracle.check_all(oracle, requests, answers)
                first = first or answers.tokens
                assert answers.tokens == first, (tp, dp, depth, limits)


@pytest.mark.ranks(2, 4)
def test_more_ranks_than_query_heads_is_refused_with_numbers(world: World, shared_folder: Path) -> None:
    tiny_models = pytest.importorskip("tests.tiny_models")
    folder = shared_folder / "llama-1-1"
    on_rank_0(world, lambda: tiny_models.make_tiny_llama(folder, 1, 1))
    with pytest.raises(UsageError, match=rf"{world.size}.*\b1\b"):
        load(world, folder, tp=world.size)


def mixed_requests(count: int) -> list[Request]:
    """Prompts of 1 to 60 tokens, some with a common beginning, greedy and sampled, 1 to 13 tokens each."""
    requests = []
    for idx in range(count):
        prompt = [(idx * 7 + i * i) % 131 for i in range(1 + (idx * 13) % 60)]
        if idx % 3 == 0:
            prompt = [*range(33), *prompt][:60]
        sampling = SamplingParams(
            max_tokens=1 + (idx * 5) % 13,
            temperature=(0.0, 0.7, 1.3)[idx % 3],
            top_k=(0, 20)[idx % 2],
            top_p=(1.0, 0.9)[idx // 2 % 2],
            seed=idx,
            stop_token_ids=(4, 5, 6),
        )
        requests.append(Request(request_id=idx, prompt_ids=tuple(prompt), sampling=sampling))
    return requests


@pytest.mark.ranks(4, timeout=150)
def test_200_mixed_requests_with_too_few_blocks_give_what_each_gives_alone(world: World, shared_folder: Path) -> None:
    tiny_models = pytest.importorskip("tests.tiny_models")
    folder = shared_folder / "llama-mixed"
    on_rank_0(world, lambda: tiny_models.make_tiny_llama(folder, 4, 2, num_layers=2, seed=5))
    requests = mixed_requests(200)
    alone: dict[int, list[int]] = {}
    served = load(world, folder, tp=1, dp=4)
    by_length = sorted(requests, key=lambda request: request.sampling.max_tokens)  # groups wait for the longest
    for start in range(0, 200, 4):  # one request a group: each has its group to itself
        answers = served.run(by_length[start : start + 4], prefix_cache=False, num_kv_blocks=40)
        alone.update(answers.tokens)
    for tp, dp, depth in [(4, 1, 1), (2, 2, 0)]:
        served = load(world, folder, tp=tp, dp=dp)
        answers = served.run(requests, depth=depth, block_size=4, num_kv_blocks=40, max_num_tokens=48)
        if world.rank == 0:
            assert answers.tokens == alone, (tp, dp, depth)


@pytest.mark.ranks(2)
def test_cached_prefix_gives_the_cold_tokens(world: World, shared_folder: Path) -> None:
    tiny_models = pytest.importorskip("tests.tiny_models")
    folder = shared_folder / "llama-prefix"
    on_rank_0(world, lambda: tiny_models.make_tiny_llama(folder, 9, 3, seed=6))
    requests = [
        Request(
            request_id=idx,
            prompt_ids=(*range(length), 100 + idx),
            sampling=SamplingParams(max_tokens=8, temperature=0.0),
        )
        for idx, length in enumerate([31, 32, 33, 16, 15, 64])
    ]
    served = load(world, folder, tp=2)
    cold = served.run(requests, prefix_cache=False)
    warm = served.run(requests, max_num_seqs=1)  # one after another: the later ones find the earlier ones' blocks
    assert warm.tokens == cold.tokens
