"""Slices of a group's rows give the same sums as whole rows, and no token twice."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.layers.rows import plan_rows
from tests.fake_collectives import run_group
from tests.layers.setups import random


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_slices_are_the_rows_of_the_sum(size: int, num_tokens: int) -> None:
    parts = [random(num_tokens, 4, seed=rank) for rank in range(size)]

    def main(tp: Collectives) -> tuple[Tensor, Tensor, Tensor]:
        sliced = plan_rows(num_tokens, tp, sliced=True)
        own = sliced.reduce(parts[tp.rank])
        return own, sliced.gather(own), plan_rows(num_tokens, tp, sliced=False).reduce(parts[tp.rank])

    results = run_group(size, main)
    whole = results[0][2]
    torch.testing.assert_close(whole, sum(parts, torch.zeros(num_tokens, 4, dtype=torch.float64)), rtol=0, atol=1e-12)
    assert torch.equal(torch.cat([own for own, _, _ in results]), whole)
    for own, gathered, reduced in results:
        assert torch.equal(gathered, whole)
        assert torch.equal(reduced, whole)
        assert len(own) in (num_tokens // size, num_tokens // size + 1)


def test_whole_rows_are_gathered_without_an_exchange() -> None:
    def main(tp: Collectives) -> list[tuple[str, tuple[int, ...]]]:
        rows = plan_rows(5, tp, sliced=False)
        x = random(5, 4)
        assert rows.gather(x) is x
        calls: list[tuple[str, tuple[int, ...]]] = tp.calls  # type: ignore[attr-defined]
        return calls

    assert run_group(2, main) == [[], []]
