"""A batch's sequences as the attention kernels take them, on the CPU."""

import torch

from dist_infer.kernels.carriers import PagedStep
from dist_infer.types import Batch, PageChanges


def paged_step(batch: Batch, block_size: int) -> PagedStep:
    """Of a batch that has all of its pages."""
    assert not isinstance(batch.pages, PageChanges)
    return PagedStep(
        query_start=torch.from_numpy(batch.query_start),
        kv_lens=torch.from_numpy(batch.kv_lens),
        page_table=torch.from_numpy(batch.pages),
        block_size=block_size,
        host_query_start=batch.query_start,
        host_kv_lens=batch.kv_lens,
    )
