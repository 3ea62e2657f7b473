"""Two ranks with a GPU each: logits and tokens of every layout as those of one GPU, eager and as graphs.

And after the warm-up no step waits for a kernel to be compiled.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.comm.agreement import EAGER
from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.expert_peers import ExpertCollectives
from dist_infer.comm.mesh import Mesh, split_heads, split_sizes
from dist_infer.comm.peer_collectives import PeerCollectives, open_peer_axes
from dist_infer.config import SchedulerConfig
from dist_infer.graphs import CudaCapture, default_sizes
from dist_infer.kernels.dispatch import Target
from dist_infer.launch.world import World
from dist_infer.layers.moe import moe_geometry
from dist_infer.models.registry import build_model, parse_config
from dist_infer.step_runner import SampledIds, StepRunner, build_step_runner
from dist_infer.types import Batch, BatchKind, Request, SamplingParams
from dist_infer.warmup import warm_up
from tests.batches import Part, make_batch
from tests.gpu_models import MODELS, make_cut_step_runner, make_real_shaped
from tests.late_compiles import noted_compiles
from tests.step_loop import StepLoop, alone
from tests.tiny_models import fill, read_config, safetensors_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs"),
]

CONFIG = SchedulerConfig(max_model_len=256, max_num_seqs=4, max_num_tokens=64, block_size=16, num_kv_blocks=60, depth=1)
SIZES = (1, 2, 4)
PROMPTS = [[(7 * i * i + (3 + row) * i + row) % 131 for i in range(70)] for row in range(5)]
VOCAB_SIZE = 131
TOLERANCE = 1e-3
# What each of two groups computes, step by step: (sequence, tokens). One group computes all of it.
STEPS: Sequence[tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]] = [
    ([(0, 17)], [(1, 5), (3, 30)]),
    ([(2, 33), (0, 1)], [(1, 1)]),
    ([(0, 1), (2, 1)], [(1, 1), (3, 1)]),
    ([(0, 1), (2, 1)], [(1, 1)]),
    ([(0, 1)], []),
    ([], [(1, 1), (3, 1)]),
    ([(0, 9), (2, 1)], [(3, 1)]),
    ([(2, 1), (0, 1)], [(3, 1), (1, 1)]),
]


@dataclass(frozen=True, slots=True)
class Place:
    """A rank in a layout."""

    mesh: Mesh
    tp: Collectives
    world: Collectives


@contextmanager
def opened(
    world: World,
    *,
    dp: int,
    ep: int,
    by_peers: bool,
    dtype: torch.dtype = torch.float32,
    max_tokens: int = 64,
    max_seqs: int = 4,
    hidden: int = 256,
    top_k: int = 4,
) -> Iterator[Place]:
    """The collectives of a layout. Ranks: collective over the world."""
    mesh = Mesh.create(world=2, rank=world.rank, dp=dp, ep=ep)
    axes = world.communicators(mesh)
    place = Place(mesh, axes.tp, axes.world)
    if by_peers:
        target = Target(device=world.device, dtype=dtype)
        tp, everyone = open_peer_axes(
            axes, mesh, target, max_tokens=max_tokens, max_seqs=max_seqs, hidden=hidden, top_k=top_k
        )
        assert isinstance(tp, PeerCollectives) if dp == 1 else isinstance(everyone, ExpertCollectives)
        place = Place(mesh, tp, everyone)
    yield place
    torch.cuda.synchronize()
    for axis in (place.tp, place.world):
        if isinstance(axis, PeerCollectives):
            axis.close()
        if isinstance(axis, ExpertCollectives):
            axis.peer_rows.close()


def make_step_runner(folder: Path, place: Place, device: torch.device, *, graphs: bool) -> StepRunner:
    """In float32. Ranks: collective over the world of the place."""
    config = parse_config(read_config(folder))
    model = build_model(config, tp=place.tp, dtype=torch.float32, device=device, mesh=place.mesh, world=place.world)
    fill(model, safetensors_torch.load_file(folder / "model.safetensors"))
    assert model.graph_blocker is None
    step_runner = build_step_runner(
        model,
        CONFIG,
        heads=split_heads(config.num_heads, config.num_kv_heads, place.mesh.tp, place.mesh.tp_rank),
        tp=place.tp,
        dtype=torch.float32,
        device=device,
        graph_sizes=SIZES if graphs else (),
    )
    step_runner.capture(CudaCapture(device))
    return step_runner


def part(row: int, start: int, num_tokens: int) -> Part:
    """Tokens of a prompt, its pages apart from the others'."""
    return Part(
        token_ids=PROMPTS[row][start : start + num_tokens],
        start=start,
        pages=[row * 8 + (page * 3) % 8 for page in range(5)],
        state_row=row,
    )


def batches_of(groups: Sequence[Sequence[tuple[int, int]]], done: dict[int, int]) -> list[Batch | None]:
    """The batches of a step by group; `done` tokens of each sequence are counted on."""
    made = []
    for steps in groups:
        parts = [part(row, done.get(row, 0), num) for row, num in steps]
        done.update({row: done.get(row, 0) + num for row, num in steps})
        made.append(make_batch(parts, block_size=16) if parts else None)
    return made


def run(step_runner: StepRunner, place: Place, batches: Sequence[Batch | None]) -> Tensor | None:
    """Logits of this rank's group over the whole vocabulary, None where it has no batch; the step as it is agreed on.

    Ranks: collective over the world of the place.
    """
    own = batches[place.mesh.dp_rank]
    wanted = [step_runner.graph_bucket(batch) for batch in batches if batch is not None]
    bucket = EAGER if EAGER in wanted else max(wanted)
    running = own if own is not None else Batch.dummy()
    counts = [0 if batch is None else batch.num_tokens for batch in batches]
    decision = replace(
        alone(running, bucket),
        kind=max((batch.kind for batch in batches if batch is not None), default=BatchKind.NONE),
        rank_tokens=tuple(counts[place.mesh.group_of(rank)] for rank in range(place.mesh.world)),
    )
    prepared = step_runner.prepare(running)
    step_runner.launch(prepared, decision)
    if bucket != EAGER:
        hidden = step_runner._left_by_forward(running.num_seqs)
    else:
        prefills = decision.kind in (BatchKind.PREFILL, BatchKind.EXTEND)
        inputs = step_runner._inputs_of(prepared).agreed(decision.rank_tokens, eager_prefill=prefills)
        hidden = step_runner._runner.forward(inputs).index_select(0, inputs.logit_rows)
    if own is None:
        return None
    logits = step_runner._runner.model.logits(hidden)
    return place.tp.all_gather(logits.t().contiguous(), split_sizes(VOCAB_SIZE, place.mesh.tp)).t()


def compare(ours: Tensor, expected: Tensor, where: str) -> None:
    error = (ours - expected).abs().max().item()
    assert error < TOLERANCE, f"{where}: {error}"
    best = expected.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > 2 * error
    assert torch.equal(ours.argmax(1)[clear], expected.argmax(1)[clear])


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("by_peers", [True, False], ids=["peer memory", "NCCL"])
@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (2, 2), (2, 1)], ids=["tp 2", "dp 2 ep 2", "dp 2 ep 1"])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_logits_are_those_of_one_gpu(
    world: World, tmp_path: Path, family: str, dp: int, ep: int, by_peers: bool
) -> None:
    """Prompts in chunks, companies that grow and shrink, groups without tokens; each step eager and as a graph."""
    if family == "llama" and dp > 1 and (by_peers or ep == 1):
        pytest.skip("groups of a model without experts exchange nothing")
    folder = make_real_shaped(tmp_path, family)
    own = Place(Mesh.create(world=1, rank=0), SingleCollectives(), SingleCollectives())
    one = make_step_runner(folder, own, world.device, graphs=False)
    with opened(world, dp=dp, ep=ep, by_peers=by_peers) as place:
        runners = [make_step_runner(folder, place, world.device, graphs=graphs) for graphs in (False, True)]
        done: dict[int, int] = {}
        for number, (first, second) in enumerate(STEPS):
            groups = [first, second] if dp == 2 else [[*first, *second]]
            before = dict(done)
            batches = batches_of(groups, done)
            expected = (
                run(one, own, batches_of([groups[place.mesh.dp_rank]], before)) if groups[place.mesh.dp_rank] else None
            )
            for way, step_runner in zip(("eager", "graph"), runners, strict=True):
                logits = run(step_runner, place, batches)
                assert (logits is None) == (expected is None)
                if logits is not None and expected is not None:
                    compare(logits, expected, f"step {number}, {way}")
        del runners


def wait(tokens: SampledIds) -> None:
    while not tokens.ready():
        time.sleep(1e-5)


def requests_of(group: int, longest: int) -> list[Request]:
    """Prompts of all lengths, and tokens chosen in all ways; each group has its own."""
    random = np.random.default_rng(group)
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}, {"presence_penalty": 0.4}]
    return [
        Request(
            request_id=idx,
            prompt_ids=tuple(random.integers(1000, size=int(2 ** random.uniform(0, np.log2(longest)))).tolist()),
            sampling=SamplingParams(max_tokens=int(random.integers(1, 30)), seed=idx, **ways[idx % len(ways)]),
        )
        for idx in range(60)
    ]


KINDS = (BatchKind.PREFILL, BatchKind.EXTEND, BatchKind.DECODE)  # each has to come up on some rank


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize(
    ("name", "dp"), [("qwen3-30b-a3b", 1), ("qwen3-30b-a3b", 2), ("deepseek-v2-lite", 1), ("deepseek-v2-lite", 2)]
)
def test_nothing_is_compiled_late_in_real_sizes(world: World, name: str, dp: int) -> None:
    """Of two layers, experts dealt to both ranks."""
    config = replace(CONFIG, max_model_len=2048, max_num_seqs=32, max_num_tokens=1024, num_kv_blocks=600)
    geometry = parse_config(read_config(MODELS / name))
    with opened(
        world,
        dp=dp,
        ep=2,
        by_peers=True,
        dtype=torch.bfloat16,
        max_tokens=config.max_num_tokens,
        max_seqs=config.max_num_seqs,
        hidden=geometry.hidden_size,
        top_k=moe_geometry(geometry).top_k,
    ) as place:
        step_runner = make_cut_step_runner(
            MODELS / name,
            config,
            graph_sizes=default_sizes(config.max_num_seqs),
            mesh=place.mesh,
            tp=place.tp,
            world=place.world,
        )
        warm_up(step_runner, config, world_size=2, on_progress=lambda _: None)
        loop = StepLoop(step_runner, config, wait)
        long_prompt = tuple(range(3, 1503))  # more than a step takes, and alone: its rest is a step that only extends
        last = Request(request_id=60, prompt_ids=long_prompt, sampling=SamplingParams(max_tokens=3, temperature=0.0))
        with noted_compiles() as late:
            for requests in (requests_of(place.mesh.dp_rank, 1500), [last]):
                loop.admit(requests)
                num_idle = 0
                while num_idle < 2:  # behind one there may be tokens to go on with
                    decision = loop.step_with(place.mesh, lambda record: place.world.all_gather(record.cuda()).cpu())
                    num_idle = 0 if decision.launched else num_idle + 1
        own = torch.tensor([[kind in loop.kinds for kind in KINDS]], dtype=torch.int64, device="cuda")
        seen = place.world.all_gather(own).any(0).tolist()
        del step_runner, loop
    assert not late, "\n".join(dict.fromkeys(late))
    assert seen == [True] * len(KINDS)
