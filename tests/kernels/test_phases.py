"""A step cut in its phases."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.phases import Attend, num_seqs_by_phase, plan_by_phase, take_sequences


def step_of(*query_lens: int) -> PagedStep:
    """Sequence s has 10 s + 7 keys and the pages [100 s, 100 s + 1]."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    num_seqs = len(query_lens)
    kv_lens = 10 * np.arange(num_seqs, dtype=np.int32) + 7
    return PagedStep(
        query_start=torch.from_numpy(starts),
        kv_lens=torch.from_numpy(kv_lens),
        page_table=100 * torch.arange(num_seqs, dtype=torch.int32)[:, None] + torch.arange(2, dtype=torch.int32),
        block_size=16,
        host_query_start=starts,
        host_kv_lens=kv_lens,
    )


def test_sequences_keep_their_rows_lengths_and_pages() -> None:
    rows, taken = take_sequences(step_of(3, 1, 0, 2), [0, 2, 3])
    assert rows.tolist() == [0, 1, 2, 4, 5]
    assert taken.query_start.tolist() == taken.host_query_start.tolist() == [0, 3, 3, 5]
    assert taken.kv_lens.tolist() == taken.host_kv_lens.tolist() == [7, 27, 37]
    assert taken.page_table.tolist() == [[0, 1], [200, 201], [300, 301]]
    assert taken.query_start.dtype == taken.kv_lens.dtype == torch.int32 and taken.num_tokens == 5


@pytest.mark.parametrize(
    ("query_lens", "phases", "counts"),
    [
        ((1, 1), ["generation"], (0, 2)),
        ((3, 0), ["context"], (2, 0)),
        ((1, 3, 0, 1), ["context", "generation"], (2, 2)),
        ((), ["generation"], (0, 0)),
    ],
)
def test_each_token_is_attended_by_its_phase(
    query_lens: tuple[int, ...], phases: list[str], counts: tuple[int, int]
) -> None:
    step = step_of(*query_lens)
    assert num_seqs_by_phase(step) == counts
    planned: list[str] = []

    def plan(name: str, factor: int, step: PagedStep) -> Attend:
        planned.append(name)

        def attend(q: Tensor, first: Tensor, second: Tensor) -> Tensor:
            assert len(q) == step.num_tokens
            return factor * q + first + second

        return attend

    attend = plan_by_phase(step, lambda part: plan("context", 10, part), lambda part: plan("generation", 1000, part))
    out = attend(torch.arange(step.num_tokens), torch.tensor(1), torch.tensor(2))
    assert planned == phases
    factors = [1000 if length == 1 else 10 for length in query_lens for _ in range(length)]
    assert out.tolist() == [factor * row + 3 for row, factor in enumerate(factors)]
