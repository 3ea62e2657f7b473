"""Attention over pages: decode by batch and context, prefill of 8,192 tokens, and an extend. Needs a GPU.

    python -m benchmarks.bench_paged_attention

One layer, bf16, pages of 16 in random order, uniform lengths. The first sequence of each case is checked against
float32. The bound is torch's scaled_dot_product_attention of cuDNN on keys and values that lie in order.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.paged_steps import make_step, slots_of_first
from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.paged_attention import LIBRARIES, plan_paged_attention

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q, k_cache, v_cache

HEAD_DIM, BLOCK_SIZE = 128, 16
SCALE = HEAD_DIM**-0.5
MODELS = {"llama-3-8b": (32, 8), "qwen3-30b-a3b": (32, 4)}  # query and KV heads
BATCHES = (1, 8, 32, 64, 128)
CONTEXTS = (1024, 4096, 8192)
DEVICE = torch.device("cuda")
MAX_ERROR = 0.01  # of the norm, in bf16


def cases() -> Iterator[tuple[str, str, list[tuple[int, int]]]]:
    """(name, model, (query length, key length) of each sequence)."""
    for model in MODELS:
        for kv_len in CONTEXTS:
            for batch in BATCHES:
                yield f"{model} bf16 decode b={batch} kv={kv_len}", model, [(1, kv_len)] * batch
        yield f"{model} bf16 prefill tokens=8192", model, [(8192, 8192)]
        yield f"{model} bf16 prefill tokens=8x1024", model, [(1024, 1024)] * 8
        yield f"{model} bf16 extend tokens=512 kv=4608", model, [(512, 4608)]


def measure(name: str, model: str, lens: list[tuple[int, int]]) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    num_heads, num_kv_heads = MODELS[model]
    step, num_slots = make_step(lens, BLOCK_SIZE, DEVICE)
    selection = resolve("paged_attention", LIBRARIES, Target(device=DEVICE, dtype=torch.bfloat16))
    attend = plan_paged_attention(step, num_kv_heads=num_kv_heads, scale=SCALE, library=selection.pick())

    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        shapes = ((step.num_tokens, num_heads), (num_slots, num_kv_heads), (num_slots, num_kv_heads))
        q, k, v = (
            torch.randn(*shape, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE, generator=generator) for shape in shapes
        )
        return q, k, v

    check(name, step, attend(*make_inputs(0)), make_inputs(0))
    num_bytes = 2 * HEAD_DIM * (2 * step.num_tokens * num_heads + 2 * sum(n for _, n in lens) * num_kv_heads)
    flops = sum(4 * HEAD_DIM * num_heads * n * (kv_len - n + (n + 1) / 2) for n, kv_len in lens)
    ours: dict[str, Run[Inputs]] = {"ours": lambda inputs: [attend(*inputs)]}
    found = compare(ours, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=20)
    bounds = {}
    if all(num_queries == kv_len for num_queries, kv_len in lens):
        bounds["cudnn sdpa, unpaged"] = sdpa_us(len(lens), lens[0][0], num_heads, num_kv_heads, num_bytes)
    return Row(
        case=name,
        ours_us=found["ours"].median_us,
        library=selection.pick().name,
        floor_us=floor_us(read_bytes=num_bytes, flops=flops),
        bounds=bounds,
    )


def check(name: str, step: PagedStep, out: Tensor, inputs: Inputs) -> None:
    """The first sequence, its last 64 queries, in float32."""
    q, k_cache, v_cache = inputs
    stop = int(step.host_query_start[1])
    start = max(0, stop - 64)
    slots = slots_of_first(step)
    keys, values = (
        cache[slots].float().repeat_interleave(q.shape[1] // cache.shape[1], 1).transpose(0, 1)
        for cache in (k_cache, v_cache)
    )
    unseen = torch.ones(stop - start, len(slots), dtype=torch.bool, device=DEVICE).triu(len(slots) - (stop - start) + 1)
    scores = (q[start:stop].float().transpose(0, 1) @ keys.transpose(1, 2) * SCALE).masked_fill(unseen, -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(0, 1)
    error = ((out[start:stop].float() - expected).norm() / expected.norm()).item()
    if not error < MAX_ERROR:
        raise BenchmarkError(f"{name}: relative error {error:.3g}")


def sdpa_us(batch: int, tokens: int, num_heads: int, num_kv_heads: int, num_bytes: int) -> float:
    """cuDNN's attention of whole prompts, keys and values in order."""

    def make_inputs(idx: int) -> Inputs:
        q, k, v = (
            torch.randn(batch, tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        return q, k, v

    def run(inputs: Inputs) -> Sequence[Tensor]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        return [out.transpose(1, 2).contiguous() if not out.transpose(1, 2).is_contiguous() else out.transpose(1, 2)]

    runs: dict[str, Run[Inputs]] = {"sdpa": run}
    return compare(runs, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=20)["sdpa"].median_us


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError for a wrong result.
    """
    rows = []
    for name, model, lens in cases():
        rows.append(measure(name, model, lens))
        row = rows[-1]
        share = 100 * (row.floor_us or 0) / row.ours_us
        bounds = ", ".join(f"{bound} {time:.1f}" for bound, time in row.bounds.items())
        sys.stdout.write(f"{name}: {row.ours_us:.1f} us, {share:.0f} % of floor {bounds}\n")
        torch.cuda.empty_cache()
    write_results("bench_paged_attention", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
