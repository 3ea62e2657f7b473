"""Sequences in pages of random order, as the attention benchmarks take them."""

from collections.abc import Sequence

import numpy as np
import torch

from dist_infer.kernels.carriers import PagedStep


def make_step(lens: Sequence[tuple[int, int]], block_size: int, device: torch.device) -> tuple[PagedStep, int]:
    """A step of sequences of (query length, key length), and how many slots their pages need."""
    generator = np.random.default_rng(0)
    counts = [-(-kv_len // block_size) for _, kv_len in lens]
    owners = generator.permutation(sum(counts)).astype(np.int32)
    page_table = np.full((len(lens), max(counts)), -1, np.int32)
    first = 0
    for row, count in zip(page_table, counts, strict=True):
        row[:count] = owners[first : first + count]
        first += count
    query_start = np.concatenate(([0], np.cumsum([num_queries for num_queries, _ in lens]))).astype(np.int32)
    kv_lens = np.array([kv_len for _, kv_len in lens], np.int32)
    step = PagedStep(
        query_start=torch.from_numpy(query_start).to(device),
        kv_lens=torch.from_numpy(kv_lens).to(device),
        page_table=torch.from_numpy(page_table).to(device),
        block_size=block_size,
        host_query_start=query_start,
        host_kv_lens=kv_lens,
    )
    return step, len(owners) * block_size


def slots_of_first(step: PagedStep) -> torch.Tensor:
    """The slots of the first sequence's keys, in order."""
    key = torch.arange(int(step.host_kv_lens[0]), device=step.page_table.device)
    return step.page_table[0].long()[key // step.block_size] * step.block_size + key % step.block_size
