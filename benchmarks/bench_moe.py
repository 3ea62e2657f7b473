"""A whole MoE layer on one GPU: router, choice of experts, experts, weighted sum; shared experts left out.

    python -m benchmarks.bench_moe [many]

With `many` only many tokens, in a file of their own.
Peer: the same in torch, with torch._grouped_mm. Bounds: parts of ours; "experts" is all that comes after the routing.
The floor counts the weights of the experts that are hit, the router's, input and output once, and the products' FLOP.
Calls rotate over copies of the weights and, with few tokens, over other experts of the same copy. Routing comes from
random activations: balanced, or skewed by router rows that grow with the expert's number.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.timing import Row, Run, compare, floor_us, write_results
from dist_infer.kernels import moe_experts, moe_route, router_gemm
from dist_infer.kernels.carriers import GatedActivation, RoutingMethod
from dist_infer.kernels.choices import select
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.reference.moe_route import moe_route as torch_moe_route
from dist_infer.kernels.reference.router_gemm import router_gemm as torch_router_gemm

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
MANY_TOKENS = (4096, 1024, 256)
NUM_SAMPLES = 11
NUM_COPIES = 2  # of the weights
CALLS_A_COPY = 4
NUM_COMPILERS = 14
_DTYPE = torch.bfloat16
_PARTS = ("experts", "experts, triton", "router", "routing")
SILU = GatedActivation.SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The MoE layer of a model, as one rank holds it."""

    name: str
    num_experts: int
    width: int
    inner: int
    method: RoutingMethod


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
        name="deepseek-v3 tp8",
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
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of one layer."""

    router: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls, model: Model, device: torch.device, *, skewed: bool) -> "Weights":
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=_DTYPE).mul_(shape[-1] ** -0.5)

        router = torch.randn(model.num_experts, model.width, device=device) * model.width**-0.5
        if skewed:
            router *= torch.linspace(0.5, 2, model.num_experts, device=device)[:, None]
        return cls(
            router=router,
            gate_up=normal(model.num_experts, 2 * model.inner, model.width),
            down=normal(model.num_experts, model.width, model.inner),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Of one call; what comes out of one part goes into the next."""

    x: Tensor
    weights: Weights
    logits: Tensor
    ids: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True)
class Ours:
    """The libraries that a model's layer would use, as runs of a benchmark."""

    router: Library[router_gemm.RouterGemmFunction]
    route: Library[moe_route.MoeRouteFunction]
    experts: Library[moe_experts.MoeExpertsFunction]

    @classmethod
    def on(cls, device: torch.device, model: Model, order: str = "") -> "Ours":
        sizes = {"experts": model.num_experts, "width": model.width, "intermediate": model.inner}
        target = Target(device=device, dtype=_DTYPE, geometry=sizes)
        return cls(
            select("router_gemm", router_gemm.LIBRARIES, target, {}).pick(),
            select("moe_route", moe_route.LIBRARIES, target, {}).pick(),
            select("moe_experts", moe_experts.LIBRARIES, target, {"moe_experts": order}).pick(),
        )

    def runs(self, method: RoutingMethod) -> dict[str, Run[Inputs]]:
        def whole(inputs: Inputs) -> Sequence[Tensor]:
            weights = inputs.weights
            logits = self.router.function(inputs.x, weights.router)
            ids, factors = self.route.function(logits, None, method, None, None)
            return [self.experts.function(inputs.x, ids, factors, weights.gate_up, weights.down, SILU)]

        def experts(inputs: Inputs) -> Sequence[Tensor]:
            weights = inputs.weights
            return [self.experts.function(inputs.x, inputs.ids, inputs.factors, weights.gate_up, weights.down, SILU)]

        return {
            "ours": whole,
            "experts": experts,
            "router": lambda inputs: [self.router.function(inputs.x, inputs.weights.router)],
            "routing": lambda inputs: list(self.route.function(inputs.logits, None, method, None, None)),
        }


def torch_layer(method: RoutingMethod) -> Run[Inputs]:
    """Rows permuted by expert, two grouped products, rows put back and added up."""

    def run(inputs: Inputs) -> Sequence[Tensor]:
        weights = inputs.weights
        ids, factors = torch_moe_route(torch_router_gemm(inputs.x, weights.router), None, method)
        flat = ids.flatten()
        order = flat.argsort()
        experts = torch.arange(1, len(weights.down) + 1, device=flat.device, dtype=flat.dtype)
        ends = torch.searchsorted(flat[order], experts, out_int32=True)
        rows = inputs.x[order // method.top_k]
        gate, up = torch._grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends).chunk(2, 1)
        outputs = torch._grouped_mm(functional.silu(gate) * up, weights.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(outputs)
        back[order] = outputs
        return [(back.view(*ids.shape, -1) * factors[:, :, None]).sum(1).to(inputs.x.dtype)]

    return run


def make_copies(model: Model, tokens: int, device: torch.device, weights: Sequence[Weights]) -> list[Inputs]:
    copies = []
    for idx in range(CALLS_A_COPY * len(weights)):
        own = weights[idx % len(weights)]
        x = torch.randn(tokens, model.width, device=device, dtype=_DTYPE)
        logits = torch_router_gemm(x, own.router)
        ids, factors = torch_moe_route(logits, None, model.method)
        copies.append(Inputs(x=x, weights=own, logits=logits, ids=ids, factors=factors))
    return copies


def check(model: Model, ours: Run[Inputs], peer: Run[Inputs], inputs: Inputs) -> None:
    """Errors: ValueError for rows that are not the peer's up to rounding. One in 200 may be others: where two logits
    are so close that the order of a sum decides between two experts.
    """
    (result,), (expected,) = ours(inputs), peer(inputs)
    errors = (result.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)
    num_wrong = int((~(errors < 0.02)).sum())
    if num_wrong > len(errors) // 200:
        raise ValueError(f"{model.name}: {num_wrong} of {len(errors)} rows are not the peer's")


def measure(model: Model, tokens: int, device: torch.device, weights: Sequence[Weights], kind: str) -> Row:
    """One row of the results."""
    copies = make_copies(model, tokens, device, weights)
    ours = Ours.on(device, model)
    candidates: dict[str, Callable[[Inputs], Sequence[Tensor]]] = ours.runs(model.method)
    if ours.experts.name != "triton" and tokens not in MANY_TOKENS:
        candidates["experts, triton"] = Ours.on(device, model, "triton").runs(model.method)["experts"]
    candidates["torch._grouped_mm"] = torch_layer(model.method)
    check(model, candidates["ours"], candidates["torch._grouped_mm"], copies[0])
    num_hit = sum(len(set(copy.ids.flatten().tolist())) for copy in copies) / len(copies)
    num_bytes = 3 * num_hit * model.inner * model.width * 2 + weights[0].router.nbytes + 2 * copies[0].x.nbytes
    found = compare(
        candidates,
        lambda idx: copies[idx % len(copies)],
        device=device,
        bytes_per_call=round(min(num_bytes, torch.cuda.get_device_properties(device).L2_cache_size * 3 / len(copies))),
        num_samples=NUM_SAMPLES,
    )
    flops = 6 * tokens * model.method.top_k * model.inner * model.width
    return Row(
        case=f"{model.name} tokens={tokens} {kind} experts={num_hit:.0f}",
        ours_us=found["ours"].median_us,
        library=ours.experts.name,
        floor_us=floor_us(read_bytes=num_bytes, flops=flops),
        peers={"torch._grouped_mm": found["torch._grouped_mm"].median_us},
        bounds={part: found[part].median_us for part in found if part in _PARTS},
    )


def compile_case(case: tuple[int, int]) -> None:
    """In a process of its own, so that many are compiled at a time; the next process finds the kernels in the cache."""
    model, tokens = MODELS[case[0]], case[1]
    device = torch.device("cuda")
    weights = [Weights.random(model, device, skewed=False)]
    for order in ("", "triton"):
        Ours.on(device, model, order).runs(model.method)["ours"](make_copies(model, tokens, device, weights)[0])
    torch.cuda.synchronize()


def compile_all() -> None:
    cases = [(idx, tokens) for tokens in TOKENS for idx in range(len(MODELS))]
    with ProcessPoolExecutor(NUM_COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_case, cases))


def measure_model(model: Model, device: torch.device, all_tokens: Sequence[int]) -> Iterator[Row]:
    """Only this model's weights are held."""
    for skewed in (False, True):
        weights = [Weights.random(model, device, skewed=skewed) for _ in range(NUM_COPIES)]
        for tokens in all_tokens:
            yield measure(model, tokens, device, weights, "skewed" if skewed else "balanced")
        del weights


def main() -> int:
    """Measures and writes the results, those of each model as soon as they are there."""
    device = torch.device("cuda")
    many = sys.argv[1:] == ["many"]
    if not many:
        compile_all()
    rows = []
    for model in MODELS:
        for row in measure_model(model, device, MANY_TOKENS if many else TOKENS):
            rows.append(row)
            parts = ", ".join(f"{name} {value:.1f}" for name, value in row.bounds.items())
            best = min(row.peers.values())
            sys.stdout.write(f"{row.case}: {row.ours_us:.1f} us, floor {row.floor_us:.1f}; {parts}; peer {best:.1f}\n")
            sys.stdout.flush()
        write_results("bench_moe_many" if many else "bench_moe", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
