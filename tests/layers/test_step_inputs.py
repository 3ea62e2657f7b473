"""A step's batch on the device."""

import numpy as np
import torch

from dist_infer.kernels.carriers import PagedStep
from dist_infer.layers.step_inputs import StepInputs


def test_counts() -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    ints = torch.tensor([0, 3], dtype=torch.int32)
    inputs = StepInputs(
        token_ids=zeros,
        positions=zeros,
        slots=zeros,
        paged=PagedStep(
            query_start=ints,
            kv_lens=ints[1:],
            page_table=torch.zeros(1, 1, dtype=torch.int32),
            block_size=4,
            host_query_start=np.array([0, 3], np.int32),
            host_kv_lens=np.array([3], np.int32),
        ),
        logit_rows=zeros[:2],
        logit_state_rows=zeros[:2],
    )
    assert (inputs.num_tokens, inputs.num_logits) == (3, 2)
