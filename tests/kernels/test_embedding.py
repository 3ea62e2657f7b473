"""Rows of a vocabulary shard."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.embedding import LIBRARIES, EmbeddingFunction, embedding
from dist_infer.kernels.triton.embedding import _embedding
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_shards_add_up_to_the_whole(
    device: str, library: Library[EmbeddingFunction], dtype: torch.dtype, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(10, 7, generator=generator).to(dtype).to(device)
    ids = torch.randint(10, (num_tokens,), generator=generator).to(device)
    parts = [
        embedding(ids, whole[first:last].contiguous(), first, library=library)
        for first, last in ((0, 4), (4, 7), (7, 7), (7, 10))
    ]
    assert all(part.dtype == dtype and part.is_contiguous() for part in parts)
    assert torch.equal(sum(parts, torch.zeros_like(parts[0])), whole[ids])


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES, [torch.float32]))
def test_ids_of_other_shards_give_zeros_even_next_to_nan(
    device: str, library: Library[EmbeddingFunction], dtype: torch.dtype
) -> None:
    weight = torch.full((2, 3), torch.nan, dtype=dtype, device=device)
    ids = torch.tensor([-1, 0, 4, 5, 6, 7, 2**40], device=device)
    rows = embedding(ids, weight, 5, library=library)
    assert rows.isnan().all(1).tolist() == [False, False, False, True, True, False, False]
    assert bool((rows[[0, 1, 2, 5, 6]] == 0).all())


def test_ahead_of_time_loads_are_wide() -> None:
    types = {"token_ids": "*i64", "weight": "*bf16", "out": "*bf16", "first_id": "i32", "num_rows": "i32"}
    types |= {"hidden": "i32:16", "weight_stride": "i32:16"}
    made = compile_ahead(_embedding, types, {"BLOCK": 2048}, num_warps=8)
    assert "ld.global.v4.b32" in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]


@pytest.mark.parametrize("ids", [torch.zeros(2, dtype=torch.int32), torch.zeros((1, 2), dtype=torch.int64)])
def test_ids_that_do_not_fit_are_refused(ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be int64 \[tokens\]"):
        embedding(ids, torch.ones(2, 3), 0, library=LIBRARIES[-1])
