"""Structures that ops take as one argument."""

import numpy as np
import torch

from dist_infer.kernels.carriers import PagedStep


def test_paged_step_counts_come_from_the_host() -> None:
    step = PagedStep(
        query_start=torch.tensor([0, 3, 4], dtype=torch.int32),
        kv_lens=torch.tensor([3, 9], dtype=torch.int32),
        page_table=torch.zeros(2, 3, dtype=torch.int32),
        block_size=4,
        host_query_start=np.array([0, 3, 4], np.int32),
        host_kv_lens=np.array([3, 9], np.int32),
    )
    assert (step.num_seqs, step.num_tokens) == (2, 4)
