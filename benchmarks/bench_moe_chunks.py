"""The MoE chunk scheduler on the host: a plan and the size vector of one chunk, and all vectors of a step.

    python -m benchmarks.bench_moe_chunks

A step makes the plan once and each vector once, whatever the number of its MoE layers. The time counts against the
step, so it is bounded: below 100 us for the plan and one vector of 64 ranks and 64 chunks.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.timing import BenchmarkError, Row, write_results
from dist_infer.comm.moe_chunks import plan_chunks

NUM_SAMPLES = 200
NUM_CALLS = 20
LIMIT_US = 100.0
CASES = ((2, 1), (8, 4), (64, 64))


def table_of(num_ranks: int, seed: int) -> list[int]:
    """Rows by rank: a long prompt, chunks of others, decodes, and ranks without tokens."""
    rng = random.Random(seed)
    return [rng.choice([0, rng.randint(1, 256), rng.randint(1, 8192), 20_000]) for _ in range(num_ranks)]


def plan_and_vectors(table: list[int], limit: int, num_vectors: int) -> int:
    """What a step does. Gives the number of chunks."""
    plan = plan_chunks(table, limit)
    for chunk in range(num_vectors):
        plan.sizes(chunk)
    return plan.num_chunks


def sample_us(call: Callable[[], object]) -> float:
    """Microseconds a call."""
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    return (time.perf_counter() - start) * 1e6 / NUM_CALLS


def measure(num_ranks: int, num_chunks: int, num_vectors: int) -> float:
    """Median microseconds over several tables."""
    samples = []
    for seed in range(NUM_SAMPLES):
        table = table_of(num_ranks, seed)
        table[0] = max(table[0], num_chunks)  # so that there are rows for so many chunks
        limit = -(-sum(table) // num_chunks)
        while plan_and_vectors(table, limit, 0) < num_chunks and limit > 1:
            limit -= 1
        samples.append(sample_us(lambda table=table, limit=limit: plan_and_vectors(table, limit, num_vectors)))  # type: ignore[misc]
    return statistics.median(samples)


def main() -> int:
    """Measures and writes the results.

    Errors: BenchmarkError where the bound is missed.
    """
    rows = []
    for num_ranks, num_chunks in CASES:
        for num_vectors in dict.fromkeys((1, num_chunks)):
            case = f"ranks={num_ranks} chunks={num_chunks} vectors={num_vectors}"
            rows.append(Row(case=case, ours_us=measure(num_ranks, num_chunks, num_vectors), library="python"))
    path = write_results("bench_moe_chunks", rows, device=torch.device("cpu"))
    sys.stdout.write(f"{path}\n" + "".join(f"{row.case}: {row.ours_us:.1f} us\n" for row in rows))
    bounded = next(row for row in rows if row.case == "ranks=64 chunks=64 vectors=1")
    if bounded.ours_us >= LIMIT_US:
        raise BenchmarkError(f"{bounded.case} takes {bounded.ours_us:.1f} us, the bound is {LIMIT_US:g} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
