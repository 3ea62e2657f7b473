"""Rows with their routing: packed as bytes and back, and handed to the experts of a rank."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.expert_rows import ExpertRows
from tests.devices import DEVICES


def make_rows(num_rows: int, width: int, top_k: int, dtype: torch.dtype, id_dtype: torch.dtype) -> ExpertRows:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, weights = torch.randn(num_rows, width), torch.randn(num_rows, top_k)
    ids = torch.randint(-1, 9, (num_rows, top_k))
    return ExpertRows(x.to(dtype), ids.to(id_dtype), weights.to(wide))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_packed_rows_come_back(device: str, dtype: torch.dtype, id_dtype: torch.dtype) -> None:
    """Also where the parts of a row begin at odd places: width 5 in bfloat16 is 10 bytes."""
    for num_rows in (0, 1, 63):
        for width, top_k in ((5, 3), (8, 2), (1, 1)):
            rows = make_rows(num_rows, width, top_k, dtype, id_dtype)
            rows = ExpertRows(rows.x.to(device), rows.ids.to(device), rows.weights.to(device))
            rows.x[:1] = torch.nan
            packed = rows.pack()
            row_bytes = sum(part.shape[1] * part.element_size() for part in (rows.x, rows.ids, rows.weights))
            assert (len(packed), packed.shape[1] * packed.element_size()) == (num_rows, row_bytes)
            assert packed.is_contiguous()
            back = rows.slice(range(0)).unpack(packed)  # any rows of the same kind can unpack them
            for part, kept in ((back.x, rows.x), (back.ids, rows.ids), (back.weights, rows.weights)):
                assert (part.dtype, part.shape) == (kept.dtype, kept.shape) and part.is_contiguous()
                torch.testing.assert_close(part, kept, rtol=0, atol=0, equal_nan=True)


def test_slices_and_strides() -> None:
    rows = make_rows(10, 4, 2, torch.float32, torch.int32)
    turned = ExpertRows(rows.x.t().contiguous().t(), rows.ids.t().contiguous().t(), rows.weights)
    assert not turned.x.is_contiguous()
    assert torch.equal(turned.slice(range(2, 7)).pack(), rows.pack()[2:7])
    assert torch.equal(rows.take(torch.tensor([6, 2])).pack(), rows.pack()[[6, 2]])
    assert len(rows.slice(range(2, 7))) == 5 and len(rows.slice(range(0))) == 0


def test_rows_are_packed_by_the_widest_word_that_fits() -> None:
    for width, top_k, word in ((8, 2, torch.int64), (8, 3, torch.int32), (5, 2, torch.int16)):
        assert make_rows(3, width, top_k, torch.bfloat16, torch.int32).pack().dtype == word


def test_rows_that_begin_at_an_odd_place() -> None:
    """A view that words can't begin at."""
    x = torch.arange(33).bfloat16()[1:].view(4, 8)
    rows = ExpertRows(x, torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2))
    assert torch.equal(rows.unpack(rows.pack()).x, x)


def test_experts_see_their_own_numbers() -> None:
    rows = ExpertRows(torch.ones(3, 2), torch.tensor([[3, 4], [6, 2], [-1, 5]]), torch.zeros(3, 2))
    seen: list[Tensor] = []

    def experts(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append(ids)
        return torch.zeros(2, 3).t()

    assert rows.apply(experts, range(3, 6)).is_contiguous()
    rows.apply(experts, range(7, 7))
    assert [ids.tolist() for ids in seen] == [[[0, 1], [-1, -1], [-1, 2]], [[-1, -1]] * 3]


def test_stand_in_goes_to_no_expert() -> None:
    rows = make_rows(0, 5, 3, torch.bfloat16, torch.int32).stand_in()
    assert rows.x.tolist() == [[0.0] * 5] and rows.ids.tolist() == [[-1] * 3] and rows.weights.tolist() == [[0.0] * 3]
    assert (rows.x.dtype, rows.ids.dtype, rows.weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
