"""Latent decode in CuTe DSL by heads, batch, context and query tokens. Needs an H100 or H200 and nvidia-cutlass-dsl.

    python -m benchmarks.bench_mla_decode

One layer's attention over cached latents, bf16, pages of 64 in random order, uniform lengths; the products with kv_b
are not part of it. The first and the last sequence of each case are checked against float64, ours and the peers'.
"""

import sys
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from benchmarks.mla_peers import Inputs, mla_peers
from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from dist_infer.kernels.cute.mla_decode import Workspace, choose_rows, mla_decode

PAGE_SIZE = 64
WIDTH, LATENT = 576, 512
SCALE = 192**-0.5
DEVICE = torch.device("cuda")
MAX_ERROR = 0.004  # of the norm, in bf16
CASES = (
    *((16, 1, batch, kv_len) for kv_len in (1024, 4096, 8192) for batch in (1, 8, 32, 64, 128)),
    *((16, query_len, batch, 4096) for query_len in (2, 4) for batch in (1, 8, 32, 64, 128)),
    *((128, 1, batch, kv_len) for kv_len in (1024, 4096, 8192) for batch in (1, 8, 32, 64, 128)),
)


def cases() -> Iterator[tuple[str, int, int, int, int]]:
    """(name, heads, query tokens, batch, context)."""
    for heads, query_len, batch, kv_len in CASES:
        yield f"bf16 decode h={heads} q={query_len} b={batch} kv={kv_len}", heads, query_len, batch, kv_len


def measure(name: str, heads: int, query_len: int, batch: int, kv_len: int) -> Row:
    """One row.

    Errors: BenchmarkError for a wrong result.
    """
    num_pages = -(-kv_len // PAGE_SIZE)
    kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
    space = Workspace(choose_rows(heads * query_len), DEVICE)

    @cache
    def make_inputs(idx: int) -> Inputs:
        generator = torch.Generator(DEVICE).manual_seed(idx)
        shapes = (batch * query_len, heads, WIDTH), (batch * num_pages * PAGE_SIZE, WIDTH)
        q, rows = (torch.randn(x, dtype=torch.bfloat16, device=DEVICE, generator=generator) for x in shapes)
        table = torch.randperm(batch * num_pages, device=DEVICE, generator=generator).int().view(batch, num_pages)
        return q, rows, table

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        out = torch.empty(*q.shape[:2], LATENT, dtype=q.dtype, device=DEVICE)
        mla_decode(
            q,
            rows,
            table,
            kv_lens,
            page_size=PAGE_SIZE,
            query_len=query_len,
            scale=SCALE,
            workspace=space,
            out=out,
        )
        return [out]

    candidates: dict[str, Run[Inputs]] = {"ours": run}
    peers = mla_peers(kv_lens, query_len, heads, PAGE_SIZE, SCALE)
    candidates |= {peer: found for peer, found in peers.items() if not isinstance(found, str)}
    for candidate, found in candidates.items():
        out = found(make_inputs(0))[0].view(-1, heads, LATENT)
        check(f"{name}, {candidate}", out, make_inputs(0), query_len, kv_len)
    num_rows = batch * query_len * heads
    num_bytes = 2 * (batch * kv_len * WIDTH + num_rows * (WIDTH + LATENT))
    us = compare(candidates, make_inputs, device=DEVICE, bytes_per_call=num_bytes, num_samples=10)
    floor = floor_us(read_bytes=num_bytes, flops=2.0 * num_rows * kv_len * (WIDTH + LATENT))
    return Row(
        case=name,
        ours_us=us["ours"].median_us,
        library="cute",
        floor_us=floor,
        peers={peer: us[peer].median_us for peer in candidates if peer != "ours"},
        not_run={peer: found for peer, found in peers.items() if isinstance(found, str)},
    )


def check(name: str, out: Tensor, inputs: Inputs, query_len: int, kv_len: int) -> None:
    """The first and the last sequence in float64."""
    q, rows, table = inputs
    token = torch.arange(kv_len, device=DEVICE)
    for seq in (0, len(table) - 1):
        own = slice(seq * query_len, (seq + 1) * query_len)
        kv = rows[table[seq, token // PAGE_SIZE].long() * PAGE_SIZE + token % PAGE_SIZE].double()
        scores = torch.einsum("qhd,kd->qhk", q[own].double(), kv) * SCALE
        seen = kv_len - query_len + 1 + torch.arange(query_len, device=DEVICE)
        scores = scores.masked_fill((token[None] >= seen[:, None])[:, None], -torch.inf)
        expected = scores.softmax(2) @ kv[:, :LATENT]
        error = ((out[own].double() - expected).norm() / expected.norm()).item()
        if not error < MAX_ERROR:
            raise BenchmarkError(f"{name}: relative error {error:.3g} of sequence {seq}")


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError for a wrong result.
    """
    rows = []
    for case in cases():
        rows.append(measure(*case))
        row = rows[-1]
        sys.stdout.write(
            f"{row.case}: {row.ours_us:.1f} us, {100 * (row.floor_us or 0) / row.ours_us:.0f} % of floor,"
            f" peers {({name: round(us, 1) for name, us in row.peers.items()}) or row.not_run}\n"
        )
        torch.cuda.empty_cache()
    write_results("bench_mla_decode", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
