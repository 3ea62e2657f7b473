"""The largest values of each row."""

import math

import pytest
import torch

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.top_k import LIBRARIES, TopKFunction, top_k
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 3), (1, 1), (63, 129), (5, 1000)])
def test_ties_go_to_the_left(
    device: str, library: Library[TopKFunction], dtype: torch.dtype, num_rows: int, num_columns: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-3, 4, (num_rows, num_columns), generator=generator).to(dtype)  # nearly all are equal to some
    rows[rows == -3] = math.nan
    rows[rows == -2] = -math.inf
    clean = [[-math.inf if math.isnan(value) else value for value in row] for row in rows.tolist()]
    for k in {1, num_columns // 2 or 1, num_columns - 1 or 1, num_columns}:
        values, columns = top_k(rows.to(device), k, library=library)
        expected = [sorted(range(num_columns), key=lambda column: (-row[column], column))[:k] for row in clean]
        assert values.dtype == dtype and values.shape == columns.shape == (num_rows, k)
        assert columns.tolist() == expected
        assert values.tolist() == [[row[column] for column in own] for row, own in zip(clean, expected, strict=True)]


@pytest.mark.parametrize("k", [-1, 0, 4])
def test_another_number_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k: {k} of"):
        top_k(torch.zeros(2, 3), k, library=LIBRARIES[-1])
