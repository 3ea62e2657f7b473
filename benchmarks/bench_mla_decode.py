"""Latent decode in CuTe DSL by heads, batch, context and query tokens. Needs an H100 or H200 and nvidia-cutlass-dsl.

    python -m benchmarks.bench_mla_decode [--peers FOLDER]

One layer's attention over cached latents, bf16, pages of 64 in random order, uniform lengths; the products with kv_b
are not part of it. The first and the last sequence of each case are checked against float64, ours and the peers'. For
peers see vllm_wheel. The first row is the host's time of a call that is not captured, all layers' arguments prepared;
its bounds are that of an addition by torch, which has little more to do than to launch, and of mla_decode, which
checks and packs all arguments at every call.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.mla_peers import Inputs, Shape, mla_peers
from benchmarks.timing import BenchmarkError, Row, Run, compare, floor_us, write_results
from benchmarks.vllm_wheel import parse_peers
from dist_infer.kernels.cute.mla_decode import Decode, Workspace, choose_rows, mla_decode

PAGE_SIZE = 64
WIDTH, LATENT = 576, 512
SCALE = 192**-0.5
DEVICE = torch.device("cuda")
MAX_ERROR = 0.004  # of the norm, in bf16
BATCHES = (1, 8, 32, 64, 128)
CONTEXTS = (1024, 4096, 8192)
LONGEST = 32768
HOST_BURST, HOST_BURSTS = 100, 30
CASES = (  # heads, query tokens, batch, context
    *((16, 1, batch, kv_len) for kv_len in CONTEXTS for batch in BATCHES),
    *((128, 1, batch, kv_len) for kv_len in CONTEXTS for batch in BATCHES),
    *((heads, 1, batch, LONGEST) for heads in (16, 128) for batch in BATCHES[:2]),
    *((16, query_len, batch, kv_len) for query_len in (2, 4) for kv_len in CONTEXTS for batch in BATCHES),
)


def cases() -> Iterator[tuple[str, int, int, int, int]]:
    """(name, heads, query tokens, batch, context)."""
    for heads, query_len, batch, kv_len in CASES:
        yield f"bf16 h={heads} b={batch} kv={kv_len} q={query_len}", heads, query_len, batch, kv_len


def measure(name: str, heads: int, query_len: int, batch: int, kv_len: int, folder: Path | None = None) -> Row:
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
    peers = mla_peers(Shape(kv_lens, query_len, heads, PAGE_SIZE, SCALE), folder)
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


def measure_host() -> Row:
    """What a call costs the host: bursts that the launch queue holds, on a stream of their own."""
    batch, heads, kv_len = 8, 16, 1024
    num_pages = kv_len // PAGE_SIZE
    q = torch.zeros(batch, heads, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.zeros(batch * kv_len, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(batch * num_pages, device=DEVICE).int().view(batch, num_pages)
    kv_lens = torch.full((batch,), kv_len, dtype=torch.int32, device=DEVICE)
    out = torch.empty(batch, heads, LATENT, dtype=q.dtype, device=DEVICE)
    space = Workspace(choose_rows(heads), q.device)

    def whole() -> None:
        mla_decode(
            q, rows, table, kv_lens, page_size=PAGE_SIZE, query_len=1, scale=SCALE, workspace=space, out=out, lse=lse
        )

    prepared = Decode(q, rows, table, kv_lens, page_size=PAGE_SIZE, query_len=1, scale=SCALE, workspace=space)
    lse = prepared.lse
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        ours = host_us(lambda: prepared(q, rows, out))
        bounds = {"torch's add_": host_us(lambda: lse.add_(1)), "mla_decode": host_us(whole)}
    name = f"host call h={heads} b={batch} kv={kv_len} q=1"
    return Row(case=name, ours_us=ours, library="cute", bounds=bounds)


def host_us(call: Callable[[], object]) -> float:
    """The median of bursts."""
    samples = []
    for _ in range(HOST_BURSTS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_BURST):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / HOST_BURST)
    return statistics.median(samples)


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
    """Measures and writes the results, anew with each row: a run may be cut short.

    Errors: BenchmarkError for a wrong result.
    """
    folder = parse_peers(__doc__, sys.argv[1:]).peers
    rows = [measure_host()]
    sys.stdout.write(f"{rows[0].case}: {rows[0].ours_us:.2f} us, {dict(rows[0].bounds)}\n")
    for case in cases():
        rows.append(measure(*case, folder))
        row = rows[-1]
        best = min(row.peers.items(), key=lambda peer: peer[1], default=("no peer", 0.0))
        sys.stdout.write(
            f"{row.case}: {row.ours_us:.1f} us, {100 * (row.floor_us or 0) / row.ours_us:.0f} % of floor,"
            f" {best[0]} {best[1]:.1f}{''.join(f'; {peer} not run: {why}' for peer, why in row.not_run.items())}\n"
        )
        torch.cuda.empty_cache()
        write_results("bench_mla_decode", rows, device=DEVICE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
