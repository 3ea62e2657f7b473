"""Latent attention over pages: decode by batch and context, and prefill of 8,192 tokens. Needs a GPU.

    python -m benchmarks.bench_mla_attention

One layer, bf16, pages of 16 in random order, uniform lengths; kv_b is folded in and applied within the time, or
expanded in prefill. The first sequence of each case is checked against float32.
"""

import sys
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.paged_steps import make_step, slots_of_first
from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Target, resolve
from dist_infer.kernels.mla_attention import LIBRARIES, plan_mla_attention

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q, cache, kv_b

LATENT, ROTATED, PLAIN, VALUE = 512, 64, 128, 128
BLOCK_SIZE = 16
SCALE = (PLAIN + ROTATED) ** -0.5
HEADS = {"deepseek-v2-lite": 16, "deepseek-v3": 128}
BATCHES = (1, 8, 32, 64, 128)
CONTEXTS = (1024, 4096, 8192)
DEVICE = torch.device("cuda")
MAX_ERROR = 0.02  # of the norm, in bf16


def cases() -> Iterator[tuple[str, str, list[tuple[int, int]]]]:
    """(name, model, (query length, key length) of each sequence)."""
    for model, heads in HEADS.items():
        for kv_len in CONTEXTS:
            for batch in BATCHES:
                yield f"{model} bf16 decode h={heads} b={batch} kv={kv_len} q=1", model, [(1, kv_len)] * batch
        yield f"{model} bf16 prefill h={heads} tokens=8192", model, [(8192, 8192)]


def measure(name: str, model: str, lens: list[tuple[int, int]]) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    heads = HEADS[model]
    step, num_slots = make_step(lens, BLOCK_SIZE, DEVICE)
    selection = resolve("mla_attention", LIBRARIES, Target(device=DEVICE, dtype=torch.bfloat16))
    attend = plan_mla_attention(step, kv_lora_rank=LATENT, scale=SCALE, library=selection.pick())

    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)

        q = random(step.num_tokens, heads, PLAIN + ROTATED)
        return q, random(num_slots, LATENT + ROTATED), random(heads, PLAIN + VALUE, LATENT) * LATENT**-0.5

    check(name, step, attend(*make_inputs(0)), make_inputs(0))
    ours: dict[str, Run[Inputs]] = {"ours": lambda inputs: [attend(*inputs)]}
    num_tokens, num_keys, weights = step.num_tokens, sum(n for _, n in lens), heads * (PLAIN + VALUE) * LATENT
    num_bytes = 2 * (num_keys * (LATENT + ROTATED) + weights + num_tokens * heads * (PLAIN + ROTATED + VALUE))
    if num_tokens == len(lens):
        flops = 2.0 * heads * num_keys * (2 * LATENT + ROTATED) + 2.0 * num_tokens * weights
    else:
        seen = sum(n * (kv_len - n + (n + 1) / 2) for n, kv_len in lens)
        flops = 2.0 * heads * seen * (PLAIN + ROTATED + VALUE) + 2.0 * num_keys * weights
    found = compare(ours, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=20)
    floor = floor_us(read_bytes=num_bytes, flops=flops)
    return Row(case=name, ours_us=found["ours"].median_us, library=selection.pick().name, floor_us=floor)


def check(name: str, step: PagedStep, out: Tensor, inputs: Inputs) -> None:
    """The first sequence, its last 16 queries, in float32."""
    q, cache, kv_b = inputs
    stop = int(step.host_query_start[1])
    start = max(0, stop - 16)
    rows = cache[slots_of_first(step)].float()
    made = rows[:, :LATENT] @ kv_b.float().transpose(1, 2)
    keys = torch.cat([made[..., :PLAIN], rows[:, LATENT:].expand(len(made), -1, -1)], 2)
    unseen = torch.ones(stop - start, len(rows), dtype=torch.bool, device=DEVICE).triu(len(rows) - (stop - start) + 1)
    scores = (q[start:stop].float().transpose(0, 1) @ keys.transpose(1, 2) * SCALE).masked_fill(unseen, -torch.inf)
    expected = (scores.softmax(-1) @ made[..., PLAIN:]).transpose(0, 1)
    error = ((out[start:stop].float() - expected).norm() / expected.norm()).item()
    if not error < MAX_ERROR:
        raise BenchmarkError(f"{name}: relative error {error:.3g}")


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError for a wrong result.
    """
    rows = []
    for name, model, lens in cases():
        rows.append(measure(name, model, lens))
        row = rows[-1]
        sys.stdout.write(f"{name}: {row.ours_us:.1f} us, {100 * (row.floor_us or 0) / row.ours_us:.0f} % of floor\n")
        torch.cuda.empty_cache()
    write_results("bench_mla_attention", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
