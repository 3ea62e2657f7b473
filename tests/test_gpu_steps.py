"""Steps on a GPU, eager and as graphs: near the float64 reference, without a wait, in constant memory."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.comm.agreement import EAGER
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import Mesh, split_heads, split_sizes
from dist_infer.config import SchedulerConfig
from dist_infer.graphs import default_sizes
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.kv_cache import KVCache
from dist_infer.models.decoder import Decoder
from dist_infer.models.registry import build_model, parse_config
from dist_infer.runner import Runner
from dist_infer.step_runner import SampledIds, StepRunner
from dist_infer.types import Batch, BatchKind, Request, SamplingParams
from dist_infer.warmup import make_batch as make_step_batch
from dist_infer.warmup import run_step, warm_up
from tests.batches import Part, make_batch
from tests.fake_collectives import run_mesh
from tests.gpu_models import MODELS, REAL_SHAPES, make_cut_step_runner, make_real_shaped, make_step_runner
from tests.late_compiles import noted_compiles
from tests.step_loop import StepLoop, alone
from tests.tiny_models import fill, load_tiny_model, read_config, safetensors_torch

pytestmark = pytest.mark.gpu

CONFIG = SchedulerConfig(
    max_model_len=256, max_num_seqs=6, max_num_tokens=64, block_size=16, num_kv_blocks=120, depth=1
)
SIZES = (1, 2, 4, 6)
PROMPTS = [[(7 * i * i + (3 + row) * i + row) % 131 for i in range(70)] for row in range(5)]
# Sequences that decode together, step by step: batches grow, shrink and are padded.
COMPANIES = [[0], [0, 1, 2], [0, 1, 2, 3, 4], [1, 3], [0, 2, 3, 4], [4], [0, 1, 2, 3, 4]]
TOLERANCE = 1e-3  # of logits in float32
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@pytest.fixture(scope="module", params=REAL_SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_real_shaped(tmp_path_factory.mktemp("gpu"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_real_shaped(tmp_path_factory.mktemp("gpu"), "llama")


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Tensor]:
    """Logits of every position of each prompt, in float64 on the CPU."""
    return [reference_logits(folder, prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def rounded_error(folder: Path, truth: list[Tensor]) -> float:
    """The largest error of logits in bfloat16 on the CPU."""
    logits = [reference_logits(folder, prompt, torch.bfloat16).double() for prompt in PROMPTS]
    return max((ours - expected).abs().max().item() for ours, expected in zip(logits, truth, strict=True))


def reference_logits(folder: Path, prompt: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    model = load_tiny_model(folder, dtype=dtype, device="cpu")
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    kv_cache = KVCache(model.config, shard, 8, 16, dtype, torch.device("cpu"))
    runner = Runner(model, kv_cache, max_num_seqs=1, device=torch.device("cpu"))
    inputs = runner.prepare(make_batch([Part(token_ids=prompt, start=0, pages=range(8))], block_size=16))
    return runner.logits(runner.forward(inputs), torch.arange(len(prompt)))


def part(row: int, start: int, num_tokens: int) -> Part:
    """Tokens of a prompt, its pages apart from the others'."""
    return Part(
        token_ids=PROMPTS[row][start : start + num_tokens],
        start=start,
        pages=[row * 8 + (page * 3) % 8 for page in range(5)],
        state_row=row,
    )


def run(step_runner: StepRunner, parts: Sequence[Part], *, eager: bool) -> Tensor:
    """Logits of the batch's logit rows; the step is run as the engine runs it."""
    batch = make_batch(parts, block_size=16)
    bucket = EAGER if eager else step_runner.graph_bucket(batch)
    prepared = step_runner.prepare(batch)
    step_runner.launch(prepared, alone(batch, bucket))
    runner = step_runner._runner
    if bucket != EAGER:
        hidden = step_runner._left_by_forward(batch.num_seqs)
        return runner.logits(hidden, torch.arange(batch.num_seqs, device="cuda"))
    return runner.run(step_runner._inputs_of(prepared))


def compare(ours: Tensor, expected: Tensor, limit: float = TOLERANCE) -> None:
    ours = ours.double().cpu()
    error = (ours - expected).abs().max().item()
    assert error < limit
    best = expected.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > 2 * error
    assert torch.equal(ours.argmax(1)[clear], expected.argmax(1)[clear])


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
def test_logits_are_those_of_the_reference(
    folder: Path, truth: list[Tensor], rounded_error: float, dtype: torch.dtype, eager: bool
) -> None:
    """Prompts in chunks, a one-token extend, a shared company of decodes that grows and shrinks."""
    if dtype == torch.bfloat16 and parse_config(read_config(folder)).moe is not None:
        pytest.skip("a rounded router chooses other experts, so there is no bound on the logits")
    model = load_tiny_model(folder, dtype=dtype, device="cuda")
    assert model.graph_blocker is None
    step_runner = make_step_runner(model, CONFIG, dtype, graph_sizes=() if eager else SIZES)
    done = [0] * len(PROMPTS)

    def step(rows: Sequence[int], *lens: int) -> None:
        parts = [part(row, done[row], num) for row, num in zip(rows, lens, strict=True)]
        for row, num in zip(rows, lens, strict=True):
            done[row] += num
        expected = torch.stack([truth[row][done[row] - 1] for row in rows])
        limit = TOLERANCE if dtype == torch.float32 else 2 * rounded_error
        compare(run(step_runner, parts, eager=eager), expected, limit)

    step([0], 40)
    step([1, 2], 17, 1)
    step([2, 0, 3], 20, 1, 33)
    step([1, 4, 0], 3, 16, 1)
    for company in COMPANIES:
        step(company, *[1] * len(company))
    step([3, 0], 9, 1)


@contextmanager
def no_wait() -> Iterator[None]:
    """An operation that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class StrictRunner(StepRunner):
    """Neither prepare nor launch may wait for the device."""

    def prepare(self, batch: Batch) -> object:  # type: ignore[override]
        with no_wait():
            return super().prepare(batch)

    def launch(self, step: object, decision: object) -> SampledIds:
        with no_wait():
            return super().launch(step, decision)  # type: ignore[arg-type]


def wait(tokens: SampledIds) -> None:
    while not tokens.ready():
        time.sleep(1e-5)


def make_requests(count: int, *, first_id: int = 0, longest: int = 24) -> list[Request]:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"top_k": 20, "top_p": 0.9},
        {"presence_penalty": 0.4},
    ]
    return [
        Request(
            request_id=first_id + idx,
            prompt_ids=tuple(PROMPTS[idx % 5][: 1 + (idx * 13) % 69]),
            sampling=SamplingParams(max_tokens=2 + (idx * 7) % (longest - 1), seed=idx, **options[idx % len(options)]),
        )
        for idx in range(count)
    ]


def test_no_step_waits_for_the_device(folder: Path) -> None:
    model = load_tiny_model(folder, dtype=torch.bfloat16, device="cuda")
    step_runner = make_step_runner(model, CONFIG, torch.bfloat16, graph_sizes=SIZES)
    warm_up(step_runner, CONFIG, world_size=1, on_progress=lambda _: None)
    step_runner.__class__ = StrictRunner
    requests = make_requests(12)
    tokens = StepLoop(step_runner, CONFIG, wait).serve(requests)
    assert {key: len(ids) for key, ids in tokens.items()} == {
        request.request_id: request.sampling.max_tokens for request in requests
    }


def test_tokens_of_graphs_are_those_of_eager_steps(llama: Path) -> None:
    """In float32, where logits of other kernels differ too little to change a token of this model."""
    model = load_tiny_model(llama, dtype=torch.float32, device="cuda")
    requests = make_requests(14)
    eager, replayed = (
        StepLoop(make_step_runner(model, CONFIG, torch.float32, graph_sizes=sizes), CONFIG, wait)
        for sizes in ((), SIZES)
    )
    assert eager.serve(requests) == replayed.serve(requests)
    assert replayed.kinds.count(BatchKind.DECODE) > 10
    alone_again = StepLoop(make_step_runner(model, CONFIG, torch.float32, graph_sizes=SIZES), CONFIG, wait)
    assert alone_again.serve(requests[5:6])[5] == replayed.tokens[5]


def memory_taken() -> tuple[int, ...]:
    """Bytes that torch holds of the device, how often it has asked the driver for some, and had to give some back."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return torch.cuda.memory_reserved(), stats["num_device_alloc"], stats["num_device_free"], stats["num_alloc_retries"]


@pytest.mark.parametrize(
    ("num_steps", "sizes"),
    [(400, SIZES), (400, SIZES[:-1]), pytest.param(20_000, SIZES, marks=pytest.mark.soak)],
    ids=["short", "largest batch eager", "long"],
)
def test_memory_and_graphs_stay_as_they_were_after_the_warm_up(
    llama: Path, num_steps: int, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A decode step is launched kernel by kernel only where no graph is large enough, and that is said once."""
    model = load_tiny_model(llama, dtype=torch.bfloat16, device="cuda")
    step_runner = make_step_runner(model, CONFIG, torch.bfloat16, graph_sizes=sizes)
    warm_up(step_runner, CONFIG, world_size=1, on_progress=lambda _: None)
    loop = StepLoop(step_runner, CONFIG, wait)
    next_id, before = 0, memory_taken()
    with noted_compiles() as late:
        while loop.num_steps < num_steps:
            if loop.scheduler.live < 8:
                loop.admit(make_requests(12, first_id=next_id, longest=24 if num_steps < 1000 else 150))
                next_id += 12
            loop.step()
            if loop.num_steps % 1000 == 0:
                assert memory_taken() == before
        loop.serve([])
    assert memory_taken() == before
    assert not late
    assert set(loop.kinds) == {BatchKind.PREFILL, BatchKind.EXTEND, BatchKind.DECODE}
    decodes = [(size, bucket) for kind, size, bucket in loop.launched if kind is BatchKind.DECODE]
    assert all((bucket == EAGER) is (size > sizes[-1]) for size, bucket in decodes)
    assert {size for size, _ in decodes} >= {1, CONFIG.max_num_seqs}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (sizes[-1] < CONFIG.max_num_seqs)
    assert all("larger than the largest graph" in warning for warning in warnings)


def test_a_step_that_planned_memory_does_not_hold_is_an_error(llama: Path) -> None:
    model = load_tiny_model(llama, dtype=torch.bfloat16, device="cuda")
    step_runner = make_step_runner(model, CONFIG, torch.bfloat16, graph_sizes=SIZES)
    pages = range(CONFIG.max_model_len // 16 + 1)
    beyond = Part(token_ids=[1], start=CONFIG.max_model_len, pages=pages, state_row=0)
    before = memory_taken()
    with pytest.raises(ValueError, match="17 pages, but only 16 are planned for"):
        run(step_runner, [beyond], eager=False)
    rows = [Part(token_ids=[1], start=5, pages=[0], state_row=row) for row in range(CONFIG.max_num_seqs + 1)]
    with pytest.raises(ValueError, match="state row 6 is not below max_num_seqs 6"):
        run(step_runner, rows, eager=False)
    assert memory_taken() == before


WAYS = [(0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 7, 1.0), (1.2, 40, 0.8), (1.0, 0, 0.95)]


def random_batch(config: SchedulerConfig, random: np.random.Generator) -> Batch:
    """Decodes, prompts and chunks of prompts of any lengths, within the limits."""
    parts: list[tuple[int, int]] = []
    num_left, num_seqs = config.max_num_tokens, int(2 ** random.uniform(0, np.log2(config.max_num_seqs)))
    only_decodes = random.random() < 0.3
    longest = np.log2(config.max_num_tokens)
    while len(parts) < num_seqs and num_left:
        new = 1 if only_decodes or random.random() < 0.5 else min(num_left, int(2 ** random.uniform(0, longest)))
        history = int(2 ** random.uniform(0, 10)) if random.random() < 0.7 or only_decodes else 0
        parts.append((new, min(new + history, config.max_model_len)))
        num_left -= new
    ways = [WAYS[idx] for idx in random.integers(len(WAYS), size=int(random.integers(1, 4)))]
    return make_step_batch(parts, block_size=config.block_size, ways=ways)


def serve_anything(step_runner: StepRunner, config: SchedulerConfig) -> None:
    """Steps of all kinds and sizes, eager and as graphs, and requests with every option of sampling."""
    random = np.random.default_rng(0)
    for _ in range(150):
        run_step(step_runner, random_batch(config, random), world_size=1)
    StepLoop(step_runner, config, wait).serve(make_requests(12))
    options: dict[str, Any] = {"logprobs": 3, "min_p": 0.1, "logit_bias": ((3, 2.0),), "frequency_penalty": 0.5}
    sampling = SamplingParams(max_tokens=5, seed=1, prompt_logprobs=2, **options)
    StepLoop(step_runner, config, wait).serve(
        [Request(request_id=idx, prompt_ids=tuple(PROMPTS[idx]), sampling=sampling) for idx in range(3)]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_nothing_is_compiled_once_the_warm_up_is_over(folder: Path, dtype: torch.dtype) -> None:
    config = replace(CONFIG, max_model_len=2048, max_num_seqs=40, max_num_tokens=1200, num_kv_blocks=300)
    model = load_tiny_model(folder, dtype=dtype, device="cuda")
    step_runner = make_step_runner(model, config, dtype, graph_sizes=default_sizes(config.max_num_seqs))
    warm_up(step_runner, config, world_size=1, on_progress=lambda _: None)
    with noted_compiles() as late:
        serve_anything(step_runner, config)
    assert not late, "\n".join(dict.fromkeys(late))


@pytest.mark.parametrize(
    ("name", "weight_format"),
    [
        *((path.name, None) for path in sorted(MODELS.iterdir())),
        *((name, weight_format) for name in ("llama-3-8b", "qwen3-30b-a3b") for weight_format in WeightFormat),
    ],
)
def test_nothing_is_compiled_late_in_real_sizes(name: str, weight_format: WeightFormat | None) -> None:
    """Of two layers; kernels have tiles by the sizes of matrices and vocabulary."""
    config = replace(CONFIG, max_model_len=4096, max_num_seqs=128, max_num_tokens=4096, num_kv_blocks=600)
    sizes = default_sizes(config.max_num_seqs)
    step_runner = make_cut_step_runner(MODELS / name, config, graph_sizes=sizes, weight_format=weight_format)
    warm_up(step_runner, config, world_size=1, on_progress=lambda _: None)
    with noted_compiles() as late:
        serve_anything(step_runner, config)
    assert not late, "\n".join(dict.fromkeys(late))


def test_a_compile_after_the_warm_up_would_be_noted(llama: Path) -> None:
    model = load_tiny_model(llama, dtype=torch.float16, device="cuda")
    step_runner = make_step_runner(model, CONFIG, torch.float16)
    with noted_compiles() as noted:
        run(step_runner, [part(0, 0, 40)], eager=True)
    assert any("triton" in line for line in noted)


@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_two_ranks_on_one_gpu(tmp_path: Path, family: str, dp: int, ep: int) -> None:
    """Eager steps of two ranks; with two groups each has sequences of its own."""
    folder = make_real_shaped(tmp_path, family)
    hf_config = read_config(folder)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    parts = [[part(0, 0, 40), part(1, 0, 7)], [part(2, 0, 21)]]
    expected = [torch.stack([reference_logits(folder, one.token_ids)[-1] for one in own]) for own in parts]

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> Tensor:
        device = torch.device("cuda", torch.cuda.current_device())
        model: Decoder = build_model(
            parse_config(hf_config), tp=tp, dtype=torch.float32, device=device, mesh=mesh, world=world
        )
        fill(model, tensors)
        shard = split_heads(model.config.num_heads, model.config.num_kv_heads, mesh.tp, mesh.tp_rank)
        runner = Runner(
            model, KVCache(model.config, shard, 40, 16, torch.float32, device), max_num_seqs=6, device=device
        )
        batch = make_batch(parts[mesh.dp_rank], block_size=16)
        table = [make_batch(parts[mesh.group_of(rank)], block_size=16).num_tokens for rank in range(2)]
        logits = runner.run(replace(runner.prepare(batch), rank_tokens=tuple(table), eager_prefill=True))
        return tp.all_gather(logits.t().contiguous(), split_sizes(131, mesh.tp)).t()

    for rank, logits in enumerate(run_mesh(2, main, dp=dp, ep=ep)):
        compare(logits, expected[rank if dp == 2 else 0])


def test_bounds_of_lengths_are_upper_bounds(llama: Path) -> None:
    """A graph that was captured for any length serves the longest sequence there may be."""
    model = load_tiny_model(llama, dtype=torch.float32, device="cuda")
    step_runner = make_step_runner(model, CONFIG, torch.float32, graph_sizes=SIZES)
    prompt = [(5 * i * i + i) % 131 for i in range(256)]
    expected = reference_logits_long(llama, prompt)
    pages = np.random.default_rng(0).permutation(120)[:16].tolist()
    for start in range(0, 255, 51):
        run(
            step_runner, [Part(token_ids=prompt[start : start + 51], start=start, pages=pages, state_row=0)], eager=True
        )
    logits = run(step_runner, [Part(token_ids=prompt[255:], start=255, pages=pages, state_row=0)], eager=False)
    compare(logits, expected[None])


def reference_logits_long(folder: Path, prompt: Sequence[int]) -> Tensor:
    model = load_tiny_model(folder, dtype=torch.float64, device="cpu")
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    kv_cache = KVCache(model.config, shard, 16, 16, torch.float64, torch.device("cpu"))
    runner = Runner(model, kv_cache, max_num_seqs=1, device=torch.device("cpu"))
    return runner.run(runner.prepare(make_batch([Part(token_ids=prompt, start=0, pages=range(16))], block_size=16)))[0]
