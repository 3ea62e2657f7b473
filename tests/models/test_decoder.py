"""Tiny random checkpoints of all families with experts against transformers in float64, in every layout."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.checkpoint.coverage import check_coverage
from dist_infer.comm import expert
from dist_infer.comm.all_reduce import FusedAllReduce
from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.expert_all_to_all import AllToAll
from dist_infer.comm.mesh import Mesh, split_heads
from dist_infer.comm.peer_collectives import PeerCollectives
from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels.carriers import Fp8Tensor, PagedStep, QuantizedTensor
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.kv_cache import KVCache
from dist_infer.layers.mlp import GatedMlp
from dist_infer.layers.quantized import INPUT_FORMATS, QuantizedWeight
from dist_infer.models.decoder import Decoder
from dist_infer.models.registry import build_model, parse_config
from dist_infer.runner import Runner
from dist_infer.types import Batch
from tests.batches import Part, make_batch
from tests.devices import DEVICES
from tests.fake_collectives import run_group, run_mesh
from tests.gpu_models import make_real_shaped
from tests.tiny_families import CONFIGS, make_tiny
from tests.tiny_models import LiftedOracle, fill, load_tiny_model, read_config, safetensors_torch

BLOCK_SIZE = 8
NUM_TOKENS = 6  # compared in every layout
ORACLE_TOKENS = 32  # and in the first test
PROMPTS = [[7], [(5 * i * i + 3) % 131 for i in range(17)], [(11 * i + i * i) % 131 for i in range(41)]]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    tokens: list[list[int]]
    logits: Tensor  # [prompt, token, V]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = make_tiny(tmp_path_factory.mktemp("family"), request.param, mtp=request.param == "deepseek-v3")
    oracle = LiftedOracle(folder)
    expected = [oracle.greedy(prompt, ORACLE_TOKENS) for prompt in PROMPTS]
    return Checkpoint(folder, [tokens for tokens, _ in expected], torch.stack([rows for _, rows in expected]))


def make_runner(model: Decoder, tp: Collectives, num_seqs: int, device: torch.device = CPU) -> Runner:
    shard = split_heads(model.config.num_heads, model.config.num_kv_heads, tp.size, tp.rank)
    kv_cache = KVCache(model.config, shard, 10 * num_seqs, BLOCK_SIZE, torch.float64, device)
    return Runner(model, kv_cache, max_num_seqs=8, device=device)


def generate(
    model: Decoder,
    tp: Collectives,
    prompts: Sequence[Sequence[int]],
    *,
    chunk: int = 1000,
    num_tokens: int = NUM_TOKENS,
    device: torch.device = CPU,
) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of the prompts in one batch, and the logits [prompt, token, V] that they were chosen from.

    Prompts come in chunks of at most `chunk` tokens; a sequence that is done with its prompt decodes meanwhile.
    """
    runner = make_runner(model, tp, len(prompts), device)
    # Pages far apart and out of order: sequence s has s, s + n, ... from the end.
    pages = [list(range(seq, runner.kv_cache.num_blocks, len(prompts)))[::-1] for seq in range(len(prompts))]
    seqs, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while any(len(own) < num_tokens for own in rows):
        active = [idx for idx, own in enumerate(rows) if len(own) < num_tokens]
        parts = []
        for idx in active:
            ids = seqs[idx][done[idx] : done[idx] + chunk]
            done[idx] += len(ids)
            complete = done[idx] == len(seqs[idx])
            parts.append(Part(token_ids=ids, start=done[idx] - len(ids), pages=pages[idx], wants_logits=complete))
        own = runner.run(runner.prepare(make_batch(parts, block_size=BLOCK_SIZE)))
        whole = tp.all_gather(own.T.contiguous()).T
        finished = [idx for idx, part in zip(active, parts, strict=True) if part.wants_logits]
        for idx, logits in zip(finished, whole, strict=True):
            rows[idx].append(logits)
            seqs[idx].append(int(logits.argmax()))
    tokens = [seq[len(prompt) :] for seq, prompt in zip(seqs, prompts, strict=True)]
    return tokens, torch.stack([torch.stack(own) for own in rows])


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_tokens_and_logits_equal_the_oracle(checkpoint: Checkpoint, tp_size: int) -> None:
    def main(tp: Collectives) -> tuple[list[list[int]], Tensor]:
        return generate(load_tiny_model(checkpoint.folder, tp), tp, PROMPTS, num_tokens=ORACLE_TOKENS)

    results = run_group(tp_size, main)
    for tokens, logits in results:
        assert tokens == checkpoint.tokens
        assert torch.equal(logits, results[0][1])
        torch.testing.assert_close(logits, checkpoint.logits, rtol=0, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("family", CONFIGS)
def test_a_gpu_gives_what_a_cpu_gives(family: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, family)
    device = torch.device("cuda")
    tokens, logits = generate(load_tiny_model(folder), SingleCollectives(), PROMPTS, chunk=15)
    model = load_tiny_model(folder, device=device)
    on_gpu, gpu_logits = generate(model, SingleCollectives(), PROMPTS, chunk=15, device=device)
    assert on_gpu == tokens
    torch.testing.assert_close(gpu_logits.cpu(), logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 5, 8, 16])
def test_chunks_of_a_prompt_see_the_whole_past(checkpoint: Checkpoint, chunk: int) -> None:
    """Chunks that end in the middle of a block, at its edge, and of one token, beside sequences that decode."""
    tp = SingleCollectives()
    tokens, logits = generate(load_tiny_model(checkpoint.folder), tp, PROMPTS, chunk=chunk)
    assert tokens == [own[:NUM_TOKENS] for own in checkpoint.tokens]
    torch.testing.assert_close(logits, checkpoint.logits[:, :NUM_TOKENS], rtol=0, atol=1e-9)


# (world, dp, ep): tp is world / dp
LAYOUTS = [(1, 1, 1), (2, 2, 2), (2, 2, 1), (3, 3, 3), (4, 2, 4), (4, 4, 4), (4, 2, 2), (4, 1, 2), (4, 4, 1)]


@pytest.mark.parametrize(
    ("layout", "max_moe_tokens"), list(zip(LAYOUTS, [7, 1, 100, 7, None, 1, 7, 1, 100], strict=True)), ids=str
)
def test_layouts_equal_the_oracle(
    checkpoint: Checkpoint, layout: tuple[int, int, int], max_moe_tokens: int | None
) -> None:
    """Groups with prompts of their own and of other lengths; where one has fewer tokens, the others' differ."""
    world_size, dp, ep = layout

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> list[tuple[list[int], Tensor]]:
        model = load_layout(checkpoint.folder, mesh, world, tp, max_moe_tokens)
        return generate_in_groups(model, mesh, world, tp)

    for rank, result in enumerate(run_mesh(world_size, main, dp=dp, ep=ep)):
        mesh = Mesh.create(world=world_size, rank=rank, dp=dp, ep=ep)
        for idx, (tokens, logits) in zip(group_prompts(mesh), result, strict=True):
            assert tokens == checkpoint.tokens[idx][:NUM_TOKENS]
            torch.testing.assert_close(logits, checkpoint.logits[idx, :NUM_TOKENS], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("world_size", "dp", "max_moe_tokens"), [(2, 2, None), (4, 4, 5), (4, 2, 7)])
def test_the_all_to_all_gives_the_same(
    checkpoint: Checkpoint,
    world_size: int,
    dp: int,
    max_moe_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is for large prefills; here it takes every one."""
    monkeypatch.setattr(expert, "_MIN_SELECTIVE_ROWS", 1)
    monkeypatch.setattr(expert, "_MIN_SAVING", -1.0)
    num_selective = []
    run = AllToAll.run

    def counted(self: AllToAll, *args: Any) -> Any:
        num_selective.append(1)
        return run(self, *args)

    monkeypatch.setattr(AllToAll, "run", counted)

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> list[tuple[list[int], Tensor]]:
        model = load_layout(checkpoint.folder, mesh, world, tp, max_moe_tokens)
        return generate_in_groups(model, mesh, world, tp)

    for rank, result in enumerate(run_mesh(world_size, main, dp=dp)):
        mesh = Mesh.create(world=world_size, rank=rank, dp=dp)
        for idx, (tokens, logits) in zip(group_prompts(mesh), result, strict=True):
            assert tokens == checkpoint.tokens[idx][:NUM_TOKENS]
            torch.testing.assert_close(logits, checkpoint.logits[idx, :NUM_TOKENS], rtol=0, atol=1e-9)
    assert num_selective


@pytest.mark.parametrize(("dtype", "worst"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_narrower_dtypes_stay_close(checkpoint: Checkpoint, dtype: torch.dtype, worst: float) -> None:
    """Logits of a whole prompt: the median over its rows, as rounding may tip a choice of experts here and there."""
    tokens = [*PROMPTS[2], *checkpoint.tokens[2][:8]]
    logits = []
    for used in (torch.float64, dtype):
        model = load_tiny_model(checkpoint.folder, dtype=used)
        heads = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
        runner = Runner(model, KVCache(model.config, heads, 7, BLOCK_SIZE, used, CPU), max_num_seqs=1, device=CPU)
        inputs = runner.prepare(make_batch([Part(token_ids=tokens, start=0, pages=range(7))], block_size=BLOCK_SIZE))
        hidden = runner.forward(inputs)
        assert hidden.dtype == used
        logits.append(runner.logits(hidden, torch.arange(len(tokens))).double())
    truth, ours = logits
    assert bool(ours.isfinite().all())
    errors = (ours - truth).norm(dim=1) / truth.norm(dim=1)
    assert errors.median().item() < worst


def quantized_hidden(model: Decoder, tp: Collectives, device: torch.device) -> Tensor:
    """Of a prompt and of the token after it.

    Shapes: -> [T + 1, D].
    """
    heads = split_heads(model.config.num_heads, model.config.num_kv_heads, tp.size, tp.rank)
    runner = Runner(
        model, KVCache(model.config, heads, 7, BLOCK_SIZE, torch.bfloat16, device), max_num_seqs=1, device=device
    )
    parts = [Part(token_ids=PROMPTS[2], start=0, pages=range(7)), Part(token_ids=[5], start=41, pages=range(7))]
    return torch.cat([runner.forward(runner.prepare(make_batch([part], block_size=BLOCK_SIZE))) for part in parts])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2, "2 peers"])
@pytest.mark.parametrize(
    ("family", "weight_format"),
    [("llama", WeightFormat.FP8), ("llama", WeightFormat.FP8_BLOCK), ("deepseek-v2-lite", WeightFormat.FP8_BLOCK)],
)
def test_a_norm_that_quantises_for_its_consumer_changes_no_bit(
    family: str,
    weight_format: WeightFormat,
    ranks: int | str,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_real_shaped(tmp_path, family)
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    place = torch.device(device)
    num_quantised = []
    multiply = QuantizedWeight.__call__

    def counted(self: QuantizedWeight, x: Tensor | Fp8Tensor, bias: Tensor | None) -> Tensor:
        num_quantised.append(isinstance(x, Fp8Tensor))
        return multiply(self, x, bias)

    monkeypatch.setattr(QuantizedWeight, "__call__", counted)

    def main(tp: Collectives) -> list[Tensor]:
        if ranks == "2 peers":
            reducer = FusedAllReduce(tp, Target(device=place, dtype=torch.bfloat16))
            tp = PeerCollectives(tp, reducer)  # type: ignore[arg-type]  # a group of threads
        config, on_loaded = parse_config(read_config(folder)), []  # type: ignore[var-annotated]
        model = build_model(
            config, tp=tp, dtype=torch.bfloat16, device=place, weight_format=weight_format, on_loaded=on_loaded
        )
        fill(model, tensors)
        for finish in on_loaded:
            finish()
        results = []
        for is_on in (True, False):
            for layer in model.layers:
                if is_on:
                    dense = INPUT_FORMATS[weight_format] if isinstance(layer.mlp, GatedMlp) else None
                    assert layer.attention_norm.gives is INPUT_FORMATS[weight_format] and layer.mlp_norm.gives is dense
                else:
                    layer.attention_norm.gives = layer.mlp_norm.gives = None
            before = len(num_quantised)
            results.append(quantized_hidden(model, tp, place))
            assert any(num_quantised[before:]) is is_on or tp.size > 1
        return results

    for fused, separate in run_group(1 if ranks == 1 else 2, main):
        assert bool(fused.isfinite().all()) and len(fused) == 42
        assert torch.equal(fused, separate)


def quantize_on_gpu(x: Tensor, out: QuantizedTensor) -> None:
    """The bytes of a GPU for a tensor of the CPU: with NVFP4 they may differ at ties (see kernels/quantize)."""
    parts = {field.name: getattr(out, field.name) for field in fields(out)}
    on_device: dict[str, Any] = {name: part.cuda() for name, part in parts.items() if isinstance(part, Tensor)}
    on_gpu = replace(out, **on_device)
    quantize_op.LIBRARIES[0].function(x.cuda(), on_gpu)
    out.data.copy_(on_gpu.data)
    out.scales.copy_(on_gpu.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", [WeightFormat.MXFP8, WeightFormat.NVFP4])
def test_narrow_weights_on_a_gpu_are_those_of_a_cpu(
    weight_format: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 41 tokens, one more token, and a prompt too long for the kernel of few tokens."""
    libraries = (*quantize_op.LIBRARIES[:1], Library(name="torch", function=quantize_on_gpu))
    monkeypatch.setattr(quantize_op, "LIBRARIES", libraries)
    folder = make_real_shaped(tmp_path, "llama")
    tensors = safetensors_torch.load_file(folder / "model.safetensors")
    results = []
    for device in (CPU, torch.device("cuda")):
        on_loaded: list[Any] = []
        model = build_model(
            parse_config(read_config(folder)),
            tp=SingleCollectives(),
            dtype=torch.bfloat16,
            device=device,
            weight_format=weight_format,
            on_loaded=on_loaded,
        )
        fill(model, tensors)
        for finish in on_loaded:
            finish()
        short = quantized_hidden(model, SingleCollectives(), device)
        heads = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
        cache = KVCache(model.config, heads, 10, BLOCK_SIZE, torch.bfloat16, device)
        runner = Runner(model, cache, max_num_seqs=1, device=device)
        part = Part(token_ids=[*PROMPTS[2], *PROMPTS[1], *PROMPTS[1]], start=0, pages=range(10))
        long = runner.forward(runner.prepare(make_batch([part], block_size=BLOCK_SIZE)))
        results.append(torch.cat([short, long]).double().cpu())
    on_cpu, on_gpu = results
    assert on_gpu.shape == on_cpu.shape and len(on_gpu) == 42 + 75
    errors = (on_gpu - on_cpu).norm(dim=1) / on_cpu.norm(dim=1)
    assert errors.max().item() < 0.02, errors


def load_layout(folder: Path, mesh: Mesh, world: Collectives, tp: Collectives, max_moe_tokens: int | None) -> Decoder:
    model = build_model(
        parse_config(read_config(folder)),
        tp=tp,
        mesh=mesh,
        world=world,
        max_moe_tokens=max_moe_tokens,
        dtype=torch.float64,
        device=CPU,
    )
    fill(model, safetensors_torch.load_file(folder / "model.safetensors"))
    return model


def group_prompts(mesh: Mesh) -> range:
    """The prompts of a group: the last group has none of them where there are more groups than prompts."""
    return range(mesh.dp_rank, len(PROMPTS), mesh.dp)


def generate_in_groups(
    model: Decoder, mesh: Mesh, world: Collectives, tp: Collectives
) -> list[tuple[list[int], Tensor]]:
    """As `generate`, one prompt after another; a group that is done runs dummies in lockstep with the others."""
    own = group_prompts(mesh)
    num_rounds = -(-len(PROMPTS) // mesh.dp)
    results: list[tuple[list[int], Tensor]] = []
    for turn in range(num_rounds):
        prompt = PROMPTS[own[turn]] if turn < len(own) else None
        runner = make_runner(model, tp, 1)
        seq = list(prompt or [])
        rows: list[Tensor] = []
        for step in range(NUM_TOKENS):
            ids: Any = seq if step == 0 else seq[-1:]
            batch = Batch.dummy()
            if prompt is not None:
                part = Part(token_ids=ids, start=len(seq) - len(ids), pages=range(7))
                batch = make_batch([part], block_size=BLOCK_SIZE)
            real = torch.tensor([batch.num_tokens if prompt is not None else 0])
            rank_tokens = tuple(world.all_gather(real).tolist())
            inputs = runner.prepare(batch).agreed(rank_tokens, eager_prefill=step == 0)
            logits = tp.all_gather(runner.run(inputs).T.contiguous()).T
            assert bool(logits.isfinite().all())
            if prompt is not None:
                rows.append(logits[0])
                seq.append(int(logits[0].argmax()))
        if prompt is not None:
            results.append((seq[len(prompt) :], torch.stack(rows)))
    return results


def test_planted_fault_the_past_is_zeroed(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that attend over their own tokens only: whole prompts hide it, chunked ones show it at once."""
    model = load_tiny_model(checkpoint.folder)
    plan = model.plan_attention

    def forgetful(step: PagedStep) -> Any:
        query_lens = np.diff(step.host_query_start)
        kv_lens = np.where(query_lens > 1, query_lens, step.host_kv_lens).astype(np.int32)
        return plan(replace(step, host_kv_lens=kv_lens, kv_lens=torch.from_numpy(kv_lens)))

    monkeypatch.setattr(model, "plan_attention", forgetful)
    _, whole = generate(model, SingleCollectives(), PROMPTS)
    torch.testing.assert_close(whole, checkpoint.logits[:, :NUM_TOKENS], rtol=0, atol=1e-9)
    _, chunked = generate(model, SingleCollectives(), PROMPTS, chunk=15)
    assert (chunked[1:, 0] - checkpoint.logits[1:, 0]).abs().amax(1).min() > 1e-3


def test_planted_fault_a_bias_is_lost(checkpoint: Checkpoint) -> None:
    """The biases of the test checkpoints change the choice of experts."""
    model = load_tiny_model(checkpoint.folder)
    biases = [slot.into for slot in model.weight_slots() if slot.name.endswith("e_score_correction_bias")]
    if not biases:
        assert model.config.moe is not None
        assert not model.config.moe.has_bias
        return
    for bias in biases:
        bias.zero_()
    _, logits = generate(model, SingleCollectives(), PROMPTS)
    assert (logits[:, 0] - checkpoint.logits[:, 0]).abs().amax(1).min() > 1e-3


def test_planted_fault_an_idle_group_returns_early(checkpoint: Checkpoint) -> None:
    """Rule 6: without its dummy the others wait in the exchange of the first layer of experts."""

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> None:
        model = load_layout(checkpoint.folder, mesh, world, tp, None)
        runner = make_runner(model, tp, 1)
        if mesh.dp_rank == 0:
            inputs = runner.prepare(make_batch([Part(token_ids=[1, 2], start=0, pages=[0])], block_size=BLOCK_SIZE))
            runner.run(inputs.agreed((2, 0), eager_prefill=True))

    with pytest.raises(BrokenBarrierError):
        run_mesh(2, main, dp=2, timeout_s=0.2)


def test_tensors_behind_the_last_layer_are_skipped_or_absent(tmp_path: Path) -> None:
    for mtp in (False, True):
        folder = make_tiny(tmp_path / str(mtp), "deepseek-v3", mtp=mtp)
        model = load_tiny_model(folder)
        names = safetensors_torch.load_file(folder / "model.safetensors").keys()
        extra = names - {slot.name for slot in model.weight_slots()}
        assert len(extra) == (3 if mtp else 0)
        assert all(any(re.fullmatch(pattern, name) for pattern in model.ignored_weights) for name in extra)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_slots_cover_every_tensor(checkpoint: Checkpoint, tp_size: int) -> None:
    """The loader's own proof on each rank, and all ranks together hold every element."""
    tensors = safetensors_torch.load_file(checkpoint.folder / "model.safetensors")

    def main(tp: Collectives) -> list[tuple[str, tuple[range, ...]]]:
        slots = list(load_tiny_model(checkpoint.folder, tp).weight_slots())
        check_coverage(slots)
        return [(slot.name, slot.take) for slot in slots]

    held = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items() if "layers.3." not in name}
    for rank in run_group(tp_size, main):
        assert sorted(name for name, _ in rank) == sorted(held)
        for name, take in rank:
            held[name][tuple(slice(part.start, part.stop) for part in take)] += 1
    assert all(bool((count >= 1).all()) for count in held.values())
    assert all(bool((count == 1).all()) for name, count in held.items() if "experts." in name)


@pytest.mark.parametrize("dp", [1, 2])
def test_what_keeps_a_step_out_of_graphs(tmp_path: Path, dp: int) -> None:
    folder = make_tiny(tmp_path, "mixtral")

    def main(mesh: Mesh, world: Collectives, tp: Collectives) -> list[str | None]:
        model = load_layout(folder, mesh, world, tp, None)
        found = [model.graph_blocker]
        model._graph_blockers.clear()  # the libraries of the CPU
        found.append(model.graph_blocker)
        for collectives in (world, tp):
            collectives.capturable = True  # type: ignore[misc]
        return [*found, model.graph_blocker]

    for libraries, collectives, left in run_mesh(2, main, dp=dp):
        assert libraries is not None and "rms_norm by torch" in libraries
        assert collectives == "the collectives between these ranks can't be captured"
        assert left is None
