"""Latent decode over a cache of E4M3 in CuTe DSL by batch and context. Needs an H100 or H200 and nvidia-cutlass-dsl.

    python -m benchmarks.bench_mla_decode_fp8

One layer's attention over cached latents of E4M3 with one scale, queries and results in bf16, all products in bf16;
16 heads, one query a sequence, pages of 64 in random order, uniform lengths; the products with kv_b are not part of it.
The first and the last sequence of each case are checked against float64.
"""

import sys
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from dist_infer.kernels.cute.mla_decode import Workspace, choose_rows, mla_decode

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q, cache, page table

PAGE_SIZE = 64
HEADS, WIDTH, LATENT = 16, 576, 512
SCALE = 192**-0.5
CACHE_SCALE = 0.5
DEVICE = torch.device("cuda")
MAX_ERROR = 0.004  # of the norm, in bf16
CASES = ((1, 4096), (32, 4096), (128, 4096), (1, 1024), (1, 8192), (8, 4096), (32, 1024), (64, 4096), (128, 1024))


def cases() -> Iterator[tuple[str, int, int]]:
    """(name, batch, context)."""
    for batch, kv_len in CASES:
        yield f"fp8 cache decode h={HEADS} q=1 b={batch} kv={kv_len}", batch, kv_len


def measure(name: str, batch: int, kv_len: int) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    num_pages = -(-kv_len // PAGE_SIZE)
    kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
    cache_scale = torch.full((1,), CACHE_SCALE, device=DEVICE)
    space = Workspace(choose_rows(HEADS, narrow=True), DEVICE)

    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        q = torch.randn(batch, HEADS, WIDTH, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        shape = (batch * num_pages * PAGE_SIZE, WIDTH)
        rows = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        table = torch.randperm(batch * num_pages, device=DEVICE, generator=generator).int().view(batch, num_pages)
        return q, (2 * rows).clamp(-448, 448).to(torch.float8_e4m3fn), table

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        out = torch.empty(batch, HEADS, LATENT, dtype=q.dtype, device=DEVICE)
        mla_decode(
            q,
            rows,
            table,
            kv_lens,
            page_size=PAGE_SIZE,
            query_len=1,
            scale=SCALE,
            workspace=space,
            out=out,
            cache_scale=cache_scale,
        )
        return [out]

    check(name, run(make_inputs(0))[0], make_inputs(0), kv_len)
    ours: dict[str, Run[Inputs]] = {"ours": run}
    num_bytes = batch * (kv_len * WIDTH + 2 * HEADS * (WIDTH + LATENT))
    found = compare(ours, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=15)
    floor = floor_us(read_bytes=num_bytes, flops=2.0 * batch * HEADS * kv_len * (WIDTH + LATENT))
    return Row(case=name, ours_us=found["ours"].median_us, library="cute", floor_us=floor)


def check(name: str, out: Tensor, inputs: Inputs, kv_len: int) -> None:
    """The first and the last sequence in float64."""
    q, rows, table = inputs
    token = torch.arange(kv_len, device=DEVICE)
    for seq in (0, len(table) - 1):
        slots = table[seq, token // PAGE_SIZE].long() * PAGE_SIZE + token % PAGE_SIZE
        kv = rows.view(torch.uint8)[slots].view(rows.dtype).double() * CACHE_SCALE
        weights = (q[seq].double() @ kv.T * SCALE).softmax(1)
        expected = weights @ kv[:, :LATENT]
        error = ((out[seq].double() - expected).norm() / expected.norm()).item()
        if not error < MAX_ERROR:
            raise BenchmarkError(f"{name}: relative error {error:.3g} of sequence {seq}")


def main() -> int:
    """Measures and writes the results, anew with each row: a run may be cut short.

    Errors: BenchmarkError for a wrong result.
    """
    rows = []
    for case in cases():
        rows.append(measure(*case))
        row = rows[-1]
        share = 100 * (row.floor_us or 0) / row.ours_us
        sys.stdout.write(f"{row.case}: {row.ours_us:.1f} us, {share:.0f} % of floor\n")
        torch.cuda.empty_cache()
        write_results("bench_mla_decode_fp8", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
