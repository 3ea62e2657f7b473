"""Latent decode over a cache of E4M3 in CuTe DSL by batch and context. Needs an H100 or H200 and nvidia-cutlass-dsl.

    python -m benchmarks.bench_mla_decode_fp8 [--peers FOLDER]

One layer's attention over cached latents of E4M3 with one scale, queries and results in bf16, weights in float16;
one query a sequence, pages of 64 in random order, uniform lengths; the products with kv_b are not part of it.
Where a case says so, queries and weights are rounded to E4M3. The first and the last sequence of each case are
checked against float64. FlashMLA (see vllm_wheel) always rounds so, and is checked against its queries.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.mla_peers import Shape, flash_mla_fp8
from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from benchmarks.vllm_wheel import parse_peers, peer_or_reason
from dist_infer.kernels.cute.mla_decode import Workspace, choose_rows, mla_decode

PAGE_SIZE = 64
WIDTH, LATENT = 576, 512
SCALE = 192**-0.5
CACHE_SCALE = 0.5
DEVICE = torch.device("cuda")
MAX_ERROR, MAX_ROUNDED_ERROR = 0.004, 0.05  # of the norm, in bf16, and with all products in E4M3
CASES = {
    16: ((1, 4096), (32, 4096), (128, 4096), (1, 1024), (1, 8192), (8, 4096), (32, 1024), (64, 4096), (128, 1024)),
    128: ((1, 4096), (8, 4096), (32, 4096), (128, 4096)),
}


class Inputs(NamedTuple):
    """Of one call."""

    q: Tensor
    rows: Tensor  # the cache
    table: Tensor
    narrow_q: Tensor  # the same queries in E4M3


def cases() -> Iterator[tuple[str, int, int, int, bool]]:
    """(name, heads, batch, context, whether queries are rounded)."""
    for heads, shapes in CASES.items():
        for batch, kv_len in shapes:
            yield f"fp8 cache decode h={heads} q=1 b={batch} kv={kv_len}", heads, batch, kv_len, False
    for batch, kv_len in CASES[128]:
        yield f"fp8 cache decode h=128 q=1 b={batch} kv={kv_len} rounded", 128, batch, kv_len, True


def measure(name: str, heads: int, batch: int, kv_len: int, rounded: bool, folder: Path | None = None) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    num_pages = -(-kv_len // PAGE_SIZE)
    kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
    cache_scale = torch.full((1,), CACHE_SCALE, device=DEVICE)
    space = Workspace(choose_rows(heads), DEVICE)

    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        q = torch.randn(batch, heads, WIDTH, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        shape = (batch * num_pages * PAGE_SIZE, WIDTH)
        rows = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        table = torch.randperm(batch * num_pages, device=DEVICE, generator=generator).int().view(batch, num_pages)
        narrow = torch.float8_e4m3fn
        if rounded:  # then nothing is lost
            q = q.to(torch.float8_e4m3fn).bfloat16()
        return Inputs(q, (2 * rows).clamp(-448, 448).to(narrow), table, q.to(narrow))

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table, _ = inputs
        out = torch.empty(batch, heads, LATENT, dtype=q.dtype, device=DEVICE)
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
            rounded=rounded,
        )
        return [out]

    first = make_inputs(0)
    check(f"{name}, ours", run(first)[0], first.q, first, kv_len, MAX_ROUNDED_ERROR if rounded else MAX_ERROR)
    candidates: dict[str, Run[Inputs]] = {"ours": run}
    shape = Shape(kv_lens, 1, heads, PAGE_SIZE, SCALE)
    peer = peer_or_reason(lambda: flash_mla_fp8(shape, cache_scale, folder))
    if not isinstance(peer, str):
        candidates["FlashMLA"] = lambda inputs: peer((inputs.narrow_q, inputs.rows, inputs.table))
        out = candidates["FlashMLA"](first)[0].view(batch, heads, LATENT)
        check(f"{name}, FlashMLA", out, first.narrow_q, first, kv_len, MAX_ROUNDED_ERROR)
    num_bytes = batch * (kv_len * WIDTH + 2 * heads * (WIDTH + LATENT))
    found = compare(candidates, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=15)
    floor = floor_us(read_bytes=num_bytes, flops=2.0 * batch * heads * kv_len * (WIDTH + LATENT))
    return Row(
        case=name,
        ours_us=found["ours"].median_us,
        library="cute",
        floor_us=floor,
        peers={name: found[name].median_us for name in candidates if name != "ours"},
        not_run={"FlashMLA": peer} if isinstance(peer, str) else {},
    )


def check(name: str, out: Tensor, q: Tensor, inputs: Inputs, kv_len: int, limit: float) -> None:
    """The first and the last sequence in float64."""
    _, rows, table, _ = inputs
    token = torch.arange(kv_len, device=DEVICE)
    for seq in (0, len(table) - 1):
        slots = table[seq, token // PAGE_SIZE].long() * PAGE_SIZE + token % PAGE_SIZE
        kv = rows.view(torch.uint8)[slots].view(rows.dtype).double() * CACHE_SCALE
        weights = (q[seq].double() @ kv.T * SCALE).softmax(1)
        expected = weights @ kv[:, :LATENT]
        error = ((out[seq].double() - expected).norm() / expected.norm()).item()
        if not error < limit:
            raise BenchmarkError(f"{name}: relative error {error:.3g} of sequence {seq}")


def main() -> int:
    """Measures and writes the results, anew with each row: a run may be cut short.

    Errors: BenchmarkError for a wrong result.
    """
    folder = parse_peers(__doc__, sys.argv[1:]).peers
    rows = []
    for case in cases():
        rows.append(measure(*case, folder))
        row = rows[-1]
        share = 100 * (row.floor_us or 0) / row.ours_us
        peers = ", ".join(f"{peer} {us:.1f}" for peer, us in row.peers.items()) or f"not run: {dict(row.not_run)}"
        sys.stdout.write(f"{row.case}: {row.ours_us:.1f} us, {share:.0f} % of floor; {peers}\n")
        torch.cuda.empty_cache()
        write_results("bench_mla_decode_fp8", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
