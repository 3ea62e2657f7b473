"""The experts of a MoE layer with quantised weights on one GPU, from routed rows to their weighted sums.

    python -m benchmarks.bench_quantized_experts

FP8 includes the quantisation of the rows. Bounds: such experts in bfloat16, and libraries that a layer would not use.
The floor counts the weights of the experts that are hit with their scales, the rows, the outputs of the pairs (written
and read) and the sums once, and the products' FLOP. Calls rotate over copies of the weights and over routings.
`--compile` only puts all kernels into their caches, many at a time; without it they are made when they are needed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Literal

import torch
from torch import Tensor

from benchmarks.timing import Row, compare, floor_us, write_results
from dist_infer.kernels import moe_experts, quantized_experts
from dist_infer.kernels.carriers import (
    Fp8Scaling,
    Fp8Tensor,
    GatedActivation,
    Mxfp8Tensor,
    Nvfp4Tensor,
    QuantizedTensor,
    ScaleLayout,
)
from dist_infer.kernels.choices import select
from dist_infer.kernels.dispatch import Target
from dist_infer.kernels.scaled_linear import WeightFormat

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
NUM_SAMPLES = 9
NUM_COPIES = 2  # of the weights
NUM_ROUTINGS = 8
NUM_COMPILERS = 14
_DTYPE = torch.bfloat16
_BYTES = {WeightFormat.FP8_BLOCK: 1.0, WeightFormat.MXFP8: 1 + 1 / 32, WeightFormat.NVFP4: 1 / 2 + 1 / 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The experts that one rank holds."""

    name: str
    num_experts: int
    top_k: int
    width: int
    inner: int
    activation: GatedActivation = GatedActivation.SILU


MODELS = (
    Model(name="deepseek-v3 tp8", num_experts=256, top_k=8, width=7168, inner=256),
    Model(
        name="minimax-m3 tp8",
        num_experts=128,
        top_k=4,
        width=6144,
        inner=384,
        activation=GatedActivation.SWIGLUOAI,
    ),
    Model(name="qwen3-30b-a3b", num_experts=128, top_k=8, width=2048, inner=768),
)
CASES = [(model, weight_format) for model in MODELS for weight_format in quantized_experts.LIBRARIES]
Inputs = tuple[Tensor, Tensor, Tensor, QuantizedTensor, QuantizedTensor]


def random_weight(rows: int, width: int, weight_format: WeightFormat, device: torch.device) -> QuantizedTensor:
    """With values of about 1 / sqrt(width), made in the format: quantising would need the memory of its input."""
    size = 16 * width**-0.5
    if weight_format is WeightFormat.NVFP4:
        return Nvfp4Tensor(
            data=torch.randint(0, 256, (rows, width // 2), device=device, dtype=torch.uint8),
            scales=torch.randint(40, 56, (rows * width // 16,), device=device, dtype=torch.uint8),
            layout=ScaleLayout.LINEAR,
            shape=(rows, width),
            global_scale=torch.full((1,), 16 / size, device=device),
        )
    values = torch.randn(rows, width, device=device, dtype=_DTYPE).to(torch.float8_e4m3fn)
    if weight_format is WeightFormat.MXFP8:
        scales = torch.randint(120, 123, (rows * width // 32,), device=device, dtype=torch.uint8)
        return Mxfp8Tensor(data=values, scales=scales, layout=ScaleLayout.LINEAR, shape=(rows, width))
    block_scales = torch.rand(rows // 128, width // 128, device=device) * width**-0.5
    return Fp8Tensor(data=values, scales=block_scales, scaling=Fp8Scaling.BLOCKS_128X128, shape=(rows, width))


def routings(model: Model, tokens: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(rows, ids, factors), experts drawn evenly."""
    made = []
    for _ in range(NUM_ROUTINGS):
        ids = torch.rand(tokens, model.num_experts, device=device).argsort(1)[:, : model.top_k].int().contiguous()
        x = torch.randn(tokens, model.width, device=device, dtype=_DTYPE)
        made.append((x, ids, torch.rand(tokens, model.top_k, device=device)))
    return made


def copies_of(
    model: Model, weight_format: WeightFormat, device: torch.device, num_copies: int = NUM_COPIES
) -> list[tuple[QuantizedTensor, ...]]:
    gate_up, down = model.num_experts * 2 * model.inner, model.num_experts * model.width
    return [
        (
            random_weight(gate_up, model.width, weight_format, device),
            random_weight(down, model.inner, weight_format, device),
        )
        for _ in range(num_copies)
    ]


def libraries_of(model: Model, weight_format: WeightFormat, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Those that have kernels, by their names: first the one that a layer would use."""
    geometry = quantized_experts.geometry_of(
        weight_format, experts=model.num_experts, width=model.width, intermediate=model.inner
    )
    target = Target(device=device, dtype=_DTYPE, geometry=geometry)
    found = select("quantized_experts", quantized_experts.LIBRARIES[weight_format], target, {})
    libraries = (found.pick(), *found.libraries)
    return {library.name: _run(library.function, model) for library in libraries if library.name != "torch"}


def in_bfloat16(model: Model, pairs: int, device: torch.device) -> Callable[..., Tensor]:
    geometry = {"experts": model.num_experts, "width": model.width, "intermediate": model.inner}
    target = Target(device=device, dtype=_DTYPE, geometry=geometry)
    return _run(select("moe_experts", moe_experts.LIBRARIES, target, {}).pick({"pairs": pairs}).function, model)


def _run(function: Callable[..., Tensor], model: Model) -> Callable[..., Tensor]:
    return lambda x, ids, factors, up, down: function(x, ids, factors, up, down, model.activation)


def measure(
    model: Model,
    weight_format: WeightFormat,
    tokens: int,
    weights: Sequence[tuple[QuantizedTensor, ...]],
    wide: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
) -> Row:
    """One row of the results."""
    inputs = routings(model, tokens, device)
    runs = libraries_of(model, weight_format, device)
    plain = in_bfloat16(model, tokens * model.top_k, device)
    num_hit = sum(len(set(ids.flatten().tolist())) for _, ids, _ in inputs) / len(inputs)
    pairs = tokens * model.top_k
    weight_bytes = num_hit * 3 * model.width * model.inner * _BYTES[weight_format]
    num_bytes = weight_bytes + 2 * (2 * pairs + 2 * tokens) * model.width
    found = compare(
        {
            name: partial(_called, run, inputs, wide if name == "bfloat16" else weights)
            for name, run in {**runs, "bfloat16": plain}.items()
        },
        lambda idx: idx,
        device=device,
        bytes_per_call=round(max(num_bytes, 2.2e7)),
        num_samples=NUM_SAMPLES,
    )
    chosen = next(iter(runs))
    number_format: Literal["bf16", "fp8"] = "fp8" if weight_format is WeightFormat.FP8_BLOCK else "bf16"
    flops = 6 * pairs * model.width * model.inner
    return Row(
        case=f"{model.name} {weight_format.value} tokens={tokens} experts={num_hit:.0f}",
        ours_us=found[chosen].median_us,
        library=chosen,
        floor_us=floor_us(read_bytes=num_bytes, flops=flops, number_format=number_format),
        bounds={name: measured.median_us for name, measured in found.items() if name != chosen},
    )


def _called(
    run: Callable[..., Tensor],
    inputs: Sequence[tuple[Tensor, ...]],
    weights: Sequence[tuple[QuantizedTensor | Tensor, ...]],
    idx: int,
) -> list[Tensor]:
    return [run(*inputs[idx % NUM_ROUTINGS], *weights[idx % NUM_COPIES])]


def compile_case(case: tuple[int, int]) -> None:
    """In a process of its own, so that many are compiled at a time; the next process finds the kernels in the cache."""
    (model, weight_format), tokens = CASES[case[0]], case[1]
    device = torch.device("cuda")
    inputs = routings(model, tokens, device)[0]
    (weights,) = copies_of(model, weight_format, device, 1)
    for run in libraries_of(model, weight_format, device).values():
        run(*inputs, *weights)
    if weight_format is WeightFormat.FP8_BLOCK:
        up = torch.zeros(model.num_experts, 2 * model.inner, model.width, device=device, dtype=_DTYPE)
        down = torch.zeros(model.num_experts, model.width, model.inner, device=device, dtype=_DTYPE)
        in_bfloat16(model, tokens * model.top_k, device)(*inputs, up, down)
    torch.cuda.synchronize()


def compile_all() -> None:
    """For all cases."""
    cases = [(idx, tokens) for idx in range(len(CASES)) for tokens in TOKENS]
    with ProcessPoolExecutor(NUM_COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_case, cases))


def measure_all(device: torch.device) -> Iterator[Row]:
    """Only one model's weights in one format, and in bfloat16, are held."""
    for model, weight_format in CASES:
        shape = (model.num_experts, 2 * model.inner, model.width)
        wide = [
            (
                torch.randn(shape, device=device, dtype=_DTYPE) * model.width**-0.5,
                torch.randn(shape[0], model.width, model.inner, device=device, dtype=_DTYPE) * model.inner**-0.5,
            )
            for _ in range(NUM_COPIES)
        ]
        weights = copies_of(model, weight_format, device)
        for tokens in TOKENS:
            yield measure(model, weight_format, tokens, weights, wide, device)
        del weights, wide


def main() -> int:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="compile only")
    if parser.parse_args().compile:
        compile_all()
        return 0
    device = torch.device("cuda")
    rows = []
    for row in measure_all(device):
        rows.append(row)
        sys.stdout.write(
            f"{row.case}: {row.library} {row.ours_us:.1f} us, floor {row.floor_us:.1f};"
            f" {', '.join(f'{name} {us:.1f}' for name, us in row.bounds.items())}\n"
        )
        sys.stdout.flush()
        write_results("bench_quantized_experts", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
