"""The experts of a MoE layer on one GPU, from rows and their experts to weighted sums; shared experts left out.

    python -m benchmarks.bench_moe [compile] [--peers FOLDER]

`compile` measures nothing: what it compiles in many processes is there for a later run, which else compiles case by
case. Peers do the same work from the same routing: vLLM's Triton kernels (see vllm_wheel) and, in bfloat16, torch with
torch._grouped_mm. Bounds: our "whole layer" with router and choice of experts, and those two alone; "triton", where
ours is another library; with many tokens both products of DeepGEMM alone, on rows that stand as it wants them. FP8
weights have scales of 128 x 128, and rows are quantised by whoever multiplies.

The floor counts the weights of the experts that are hit, input and output, and the outputs of all pairs, written and
read; and the products' FLOP. Calls rotate over copies of the weights and, with few tokens, over other experts of the
same copy. Routing comes from random activations: random, or skewed by router rows that grow with the expert's number.
The first and the last row of each case are checked against float64, ours and the peers'.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.moe_peers import deep_gemm_products, triton_experts
from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from benchmarks.vllm_wheel import parse_peers, peer_or_reason
from dist_infer.kernels import moe_experts, moe_route, quantized_experts, router_gemm
from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation, RoutingMethod
from dist_infer.kernels.choices import select
from dist_infer.kernels.dispatch import Library, Sizes, Target
from dist_infer.kernels.reference.moe_route import moe_route as torch_moe_route
from dist_infer.kernels.reference.router_gemm import router_gemm as torch_router_gemm
from dist_infer.kernels.scaled_linear import WeightFormat

Format: TypeAlias = Literal["bf16", "fp8"]
Experts: TypeAlias = Callable[..., Tensor]  # x, ids, factors, gate and up, down

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
DEEP_GEMM_TOKENS = 1024
NUM_SAMPLES = 9
NUM_COPIES = 2  # of the weights
CALLS_A_COPY = 4
NUM_COMPILERS = 14
MAX_ERROR: dict[Format, float] = {"bf16": 0.015, "fp8": 0.06}  # of the norm; FP8 rows have four bits
_DTYPE = torch.bfloat16
_BLOCK = 128
_PEERS = ("vLLM fused_experts", "torch._grouped_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The MoE layer of a model, as one rank holds it."""

    name: str
    num_experts: int
    width: int
    inner: int
    method: RoutingMethod
    activation: GatedActivation = GatedActivation.SILU
    formats: tuple[Format, ...] = ("bf16",)


MODELS = (
    Model(
        name="qwen3-30b-a3b",
        num_experts=128,
        width=2048,
        inner=768,
        method=RoutingMethod(scoring="softmax", top_k=8, renormalise=True),
    ),
    Model(
        name="deepseek-v2-lite",
        num_experts=64,
        width=2048,
        inner=1408,
        method=RoutingMethod(scoring="softmax", top_k=6),
    ),
    Model(
        name="deepseek-v3-tp8",
        num_experts=256,
        width=7168,
        inner=256,
        method=RoutingMethod(
            scoring="sigmoid",
            top_k=8,
            renormalise=True,
            renorm_epsilon=1e-20,
            scaling_factor=2.5,
            num_groups=8,
            num_kept_groups=4,
            group_score="top2_sum",
        ),
        formats=("fp8", "bf16"),
    ),
    Model(
        name="minimax-m3-tp8",
        num_experts=128,
        width=6144,
        inner=384,
        method=RoutingMethod(scoring="sigmoid", top_k=4, renormalise=True, scaling_factor=2.0),
        activation=GatedActivation.SWIGLUOAI,
    ),
)
CASES: tuple[tuple[Model, Format], ...] = tuple((model, kind) for model in MODELS for kind in model.formats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of one layer: matrices in bfloat16, or all experts' rows in FP8."""

    router: Tensor
    gate_up: Tensor | Fp8Tensor
    down: Tensor | Fp8Tensor

    @classmethod
    def random(cls, model: Model, kind: Format, device: torch.device, *, skewed: bool) -> "Weights":
        def normal(rows: int, width: int) -> Tensor | Fp8Tensor:
            values = torch.randn(model.num_experts, rows, width, device=device, dtype=_DTYPE)
            if kind == "bf16":
                return values.mul_(width**-0.5)
            shape = (model.num_experts * rows, width)
            scales = (torch.rand(shape[0] // _BLOCK, width // _BLOCK, device=device) + 0.5) * width**-0.5
            data = values.to(torch.float8_e4m3fn).view(shape)
            return Fp8Tensor(data=data, scales=scales, scaling=Fp8Scaling.BLOCKS_128X128, shape=shape)

        router = torch.randn(model.num_experts, model.width, device=device) * model.width**-0.5
        if skewed:
            router *= torch.linspace(0.5, 2, model.num_experts, device=device)[:, None]
        return cls(router=router, gate_up=normal(2 * model.inner, model.width), down=normal(model.width, model.inner))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Of one call; what comes out of one part goes into the next."""

    x: Tensor
    weights: Weights
    logits: Tensor
    ids: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The libraries that a model's layer would use, as runs of a benchmark."""

    model: Model
    name: str  # of the library of the experts
    router: Library[router_gemm.RouterGemmFunction]
    route: Library[moe_route.MoeRouteFunction]
    experts: Experts

    @classmethod
    def on(cls, device: torch.device, model: Model, kind: Format, rows: int, order: str = "") -> "Ours":
        sizes: Sizes = {"experts": model.num_experts, "width": model.width, "intermediate": model.inner}
        step = {"pairs": rows * model.method.top_k}
        if kind == "fp8":
            sizes = quantized_experts.geometry_of(WeightFormat.FP8_BLOCK, **sizes)
        target = Target(device=device, dtype=_DTYPE, geometry=sizes)
        found: Library[Any]
        if kind == "fp8":
            libraries = quantized_experts.LIBRARIES[WeightFormat.FP8_BLOCK]
            found = select("quantized_experts", libraries, target, {"quantized_experts": order}).pick(step)
        else:
            orders = {"moe_experts": order}
            found = select("moe_experts", moe_experts.LIBRARIES, target, orders).pick(step)
        function: Any = found.function
        return cls(
            model=model,
            name=found.name,
            router=select("router_gemm", router_gemm.LIBRARIES, target, {}).pick(),
            route=select("moe_route", moe_route.LIBRARIES, target, {}).pick(),
            experts=lambda *given: function(*given, model.activation),
        )

    def runs(self) -> dict[str, Run[Inputs]]:
        def whole(inputs: Inputs) -> Sequence[Tensor]:
            weights = inputs.weights
            logits = self.router.function(inputs.x, weights.router)
            ids, factors = self.route.function(logits, None, self.model.method, None, None)
            return [self.experts(inputs.x, ids, factors, weights.gate_up, weights.down)]

        return {
            "ours": run_of(self.experts),
            "whole layer": whole,
            "router": lambda inputs: [self.router.function(inputs.x, inputs.weights.router)],
            "routing": lambda inputs: list(self.route.function(inputs.logits, None, self.model.method, None, None)),
        }


def run_of(experts: Experts) -> Run[Inputs]:
    """Experts as a candidate."""

    def run(inputs: Inputs) -> Sequence[Tensor]:
        return [experts(inputs.x, inputs.ids, inputs.factors, inputs.weights.gate_up, inputs.weights.down)]

    return run


def torch_experts(
    activation: GatedActivation, x: Tensor, ids: Tensor, factors: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Rows permuted by expert, two grouped products, rows put back and added up."""
    flat = ids.flatten()
    order = flat.argsort()
    experts = torch.arange(1, len(down) + 1, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(flat[order], experts, out_int32=True)
    gate, up = torch._grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
    outputs = torch._grouped_mm(gated(gate, up, activation), down.transpose(1, 2), offs=ends)
    back = torch.empty_like(outputs)
    back[order] = outputs
    return (back.view(*ids.shape, -1) * factors[:, :, None]).sum(1).to(x.dtype)


def gated(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    """The activation in torch."""
    if activation is GatedActivation.SILU:
        return functional.silu(gate) * up
    gate = gate.clamp(max=7)
    return (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)


def peers_of(model: Model, kind: Format, folder: Path | None) -> dict[str, Experts | str]:
    """Each peer, or why it can't run."""
    grouped: Experts | str = partial(torch_experts, model.activation)
    return {
        "vLLM fused_experts": peer_or_reason(lambda: triton_experts(folder, model.activation)),
        "torch._grouped_mm": grouped if kind == "bf16" else "takes no FP8 with scales of blocks",
    }


def make_copies(model: Model, tokens: int, device: torch.device, weights: Sequence[Weights]) -> list[Inputs]:
    copies = []
    for idx in range(CALLS_A_COPY * len(weights)):
        own = weights[idx % len(weights)]
        x = torch.randn(tokens, model.width, device=device, dtype=_DTYPE)
        logits = torch_router_gemm(x, own.router)
        ids, factors = torch_moe_route(logits, None, model.method)
        copies.append(Inputs(x=x, weights=own, logits=logits, ids=ids.int(), factors=factors))
    return copies


def check(name: str, model: Model, kind: Format, out: Tensor, inputs: Inputs) -> None:
    """Errors: BenchmarkError where the first or the last row is not what it should be."""
    for row in {0, len(out) - 1}:
        x, expected = inputs.x[row].double(), torch.zeros(model.width, dtype=torch.float64, device=out.device)
        for expert, factor in zip(inputs.ids[row].tolist(), inputs.factors[row].tolist(), strict=True):
            gate, up = (matrix_of(inputs.weights.gate_up, expert, 2 * model.inner) @ x).chunk(2)
            hidden = gated(gate, up, model.activation)
            expected += factor * (matrix_of(inputs.weights.down, expert, model.width) @ hidden)
        error = ((out[row].double() - expected).norm() / expected.norm()).item()
        if not error < MAX_ERROR[kind]:
            raise BenchmarkError(f"{model.name} {kind}, {name}: relative error {error:.3g} of row {row} of {len(out)}")


def matrix_of(weight: Tensor | Fp8Tensor, expert: int, rows: int) -> Tensor:
    """One expert's, in float64."""
    if isinstance(weight, Tensor):
        return weight[expert].double()
    data = weight.data[expert * rows : (expert + 1) * rows].double()
    scales = weight.scales[expert * rows // _BLOCK : (expert + 1) * rows // _BLOCK].double()
    return data * scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)


def measure(
    model: Model,
    kind: Format,
    tokens: int,
    device: torch.device,
    weights: Sequence[Weights],
    spread: str,
    folder: Path | None,
) -> Row:
    """One row of the results."""
    copies = make_copies(model, tokens, device, weights)
    ours = Ours.on(device, model, kind, tokens)
    candidates = ours.runs()
    if ours.name != "triton":
        candidates["triton"] = Ours.on(device, model, kind, tokens, "triton").runs()["ours"]
    peers = peers_of(model, kind, folder)
    candidates |= {name: run_of(peer) for name, peer in peers.items() if not isinstance(peer, str)}
    for name in candidates.keys() - {"router", "routing"}:
        check(name, model, kind, candidates[name](copies[0])[0], copies[0])
    products = peer_or_reason(partial(products_alone, copies, folder)) if tokens >= DEEP_GEMM_TOKENS else ""
    if not isinstance(products, str):
        candidates["DeepGEMM, products alone"] = products
    num_hit = sum(len(set(copy.ids.flatten().tolist())) for copy in copies) / len(copies)
    pairs = tokens * model.method.top_k
    weight_bytes = num_hit * 3 * model.inner * model.width * (2 if kind == "bf16" else 1 + 4 / _BLOCK**2)
    num_bytes = weight_bytes + 2 * model.width * (2 * tokens + 2 * pairs)
    found = compare(
        candidates,
        lambda idx: copies[idx % len(copies)],
        device=device,
        bytes_per_call=round(min(num_bytes, torch.cuda.get_device_properties(device).L2_cache_size * 3 / len(copies))),
        num_samples=NUM_SAMPLES,
    )
    figures = {name: measured.median_us for name, measured in found.items()}
    return Row(
        case=f"{model.name} {kind} tokens={tokens} {spread}",
        ours_us=figures.pop("ours"),
        library=ours.name,
        floor_us=floor_us(read_bytes=num_bytes, flops=6 * pairs * model.inner * model.width, number_format=kind),
        peers={name: figures.pop(name) for name in _PEERS if name in figures},
        not_run={name: peer for name, peer in peers.items() if isinstance(peer, str)},
        bounds=figures,
    )


def products_alone(copies: Sequence[Inputs], folder: Path | None) -> Run[Inputs]:
    """DeepGEMM's on the rows of each copy's experts. It gives no outputs: rows that pad its layout stay unwritten."""
    runs = {
        id(copy): deep_gemm_products(folder, copy.ids, copy.weights.gate_up, copy.weights.down) for copy in copies[:2]
    }
    by_weights = {id(copy.weights): runs[id(copy)] for copy in copies[:2]}
    for products in by_weights.values():
        products()  # compiles what it needs, or tells that it can't

    def run(inputs: Inputs) -> Sequence[Tensor]:
        by_weights[id(inputs.weights)]()
        return []

    return run


def compile_case(folder: Path | None, case: tuple[int, int]) -> None:
    """In a process of its own, so that many are compiled at a time; the next process finds the kernels in the cache."""
    (model, kind), tokens = CASES[case[0]], case[1]
    device = torch.device("cuda")
    weights = [Weights.random(model, kind, device, skewed=False)]
    inputs = make_copies(model, tokens, device, weights)[0]
    for order in ("", "triton"):
        Ours.on(device, model, kind, tokens, order).runs()["whole layer"](inputs)
    peer = peers_of(model, kind, folder)["vLLM fused_experts"]
    if not isinstance(peer, str):
        run_of(peer)(inputs)
    if tokens >= DEEP_GEMM_TOKENS:
        peer_or_reason(lambda: deep_gemm_products(folder, inputs.ids, weights[0].gate_up, weights[0].down)())
    torch.cuda.synchronize()


def compile_all(folder: Path | None) -> None:
    cases = [(idx, tokens) for tokens in TOKENS for idx in range(len(CASES))]
    with ProcessPoolExecutor(NUM_COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(compile_case, folder), cases))


def measure_model(model: Model, kind: Format, device: torch.device, folder: Path | None) -> Iterator[Row]:
    """Only this model's weights are held."""
    for skewed in (False, True):
        weights = [Weights.random(model, kind, device, skewed=skewed) for _ in range(NUM_COPIES)]
        for tokens in TOKENS:
            yield measure(model, kind, tokens, device, weights, "skewed" if skewed else "random", folder)
        del weights
        torch.cuda.empty_cache()


def main() -> int:
    """Measures and writes the results, those of each model as soon as they are there."""
    device = torch.device("cuda")
    options = parse_peers(__doc__, sys.argv[1:], "compile")
    if options.what == "compile":
        compile_all(options.peers)
        return 0
    rows = []
    for model, kind in CASES:
        for row in measure_model(model, kind, device, options.peers):
            rows.append(row)
            others = ", ".join(f"{name} {value:.1f}" for name, value in {**row.peers, **row.bounds}.items())
            unrun = "".join(f"; {name} not run: {why}" for name, why in row.not_run.items())
            share = 100 * (row.floor_us or 0) / row.ours_us
            sys.stdout.write(f"{row.case}: {row.library} {row.ours_us:.1f} us, {share:.0f} %; {others}{unrun}\n")
            sys.stdout.flush()
        write_results("bench_moe", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
