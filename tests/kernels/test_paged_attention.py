"""Paged attention: prefill, extend and decode in one step, against a plain formula on unpaged keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.paged_attention import LIBRARIES, PlanFunction, plan_paged_attention
from dist_infer.kernels.reference import paged_attention as reference
from tests.devices import DEVICES
from tests.yardstick import check_error, check_rounded_once

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.3

# (query length, key length) of each sequence
STEPS = {
    "nothing": [],
    "one empty": [(1, 0)],
    "one token": [(1, 1)],
    "decode": [(1, 1), (1, 63), (1, 129), (1, 64), (1, 65), (1, 5)],
    "decode alike": [(1, 33), (1, 40), (1, 64)],
    "decode with empty": [(1, 17), (1, 0), (1, 129)],
    "prefill": [(63, 63), (2, 2), (129, 129)],
    "extend": [(63, 129), (2, 63), (128, 129)],
    "all kinds": [(1, 129), (63, 63), (1, 0), (1, 1), (17, 129), (1, 63), (2, 2)],
}


@dataclass
class Case:
    """One step with its paged tensors and the same keys and values in order."""

    step: PagedStep
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keys: list[Tensor]  # [kv_len, K, H] of each sequence
    values: list[Tensor]
    lens: Sequence[tuple[int, int]]


def make_case(
    lens: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    filler: float = torch.nan,
) -> Case:
    """What no sequence owns holds `filler`: unused pages and the rest of last pages."""
    generator = torch.Generator().manual_seed(17)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    num_pages = [-(-kv_len // block_size) for _, kv_len in lens]
    owners = torch.randperm(sum(num_pages) + 2, generator=generator).tolist()
    page_table = np.full((len(lens), max(num_pages, default=0) + 1), -1, np.int32)
    caches = [
        torch.full((len(owners) * block_size, kv_heads, head_dim), filler, dtype=dtype, device=device) for _ in range(2)
    ]
    tokens: list[list[Tensor]] = [[], []]
    for row, (_, kv_len), count in zip(page_table, lens, num_pages, strict=True):
        row[:count] = [owners.pop() for _ in range(count)]
        flat = [int(row[i // block_size]) * block_size + i % block_size for i in range(kv_len)]
        for cache, parts in zip(caches, tokens, strict=True):
            parts.append(random(kv_len, kv_heads, head_dim))
            cache[flat] = parts[-1]
    query_start = np.concatenate(([0], np.cumsum([n for n, _ in lens]))).astype(np.int32)
    kv_lens = np.array([n for _, n in lens], np.int32)
    step = PagedStep(
        query_start=torch.from_numpy(query_start).to(device),
        kv_lens=torch.from_numpy(kv_lens).to(device),
        page_table=torch.from_numpy(page_table).to(device),
        block_size=block_size,
        host_query_start=query_start,
        host_kv_lens=kv_lens,
    )
    return Case(step, random(step.num_tokens, heads, head_dim), caches[0], caches[1], tokens[0], tokens[1], lens)


def formula(case: Case, dtype: torch.dtype) -> Tensor:
    """Head by head, query by query, everything in `dtype` with softmax in at least float32."""
    out = torch.zeros_like(case.q, dtype=dtype)
    row = 0
    for (num_queries, kv_len), keys, values in zip(case.lens, case.keys, case.values, strict=True):
        group_len = case.q.shape[1] // keys.shape[1]
        for t in range(num_queries):
            seen = kv_len - num_queries + t + 1
            for head in range(case.q.shape[1]) if seen > 0 else ():
                k, v = (x[:seen, head // group_len].to(dtype) for x in (keys, values))
                scores = (k @ case.q[row + t, head].to(dtype)) * SCALE
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                out[row + t, head] = scores.to(wide).softmax(0).to(dtype) @ v
        row += num_queries
    return out


def attend(case: Case, library: Library[PlanFunction]) -> Tensor:
    planned = plan_paged_attention(case.step, num_kv_heads=case.k_cache.shape[1], scale=SCALE, library=library)
    return planned(case.q, case.k_cache, case.v_cache)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "block_size"),
    [
        (torch.float64, 3, 1, 6, 4),
        (torch.float32, 4, 2, 8, 16),
        (torch.bfloat16, 2, 2, 16, 1),
        (torch.float16, 1, 1, 8, 7),
    ],
)
def test_against_the_formula(
    device: str,
    library: Library[PlanFunction],
    name: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """NaN in every slot that no sequence owns: it must not be seen."""
    case = make_case(
        STEPS[name],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    out = attend(case, library)
    assert out.is_contiguous()
    truth = formula(case, torch.float64)
    check_error(out, truth, formula(case, dtype))
    check_rounded_once(out, truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_no_keys_give_zeros_in_a_cache_without_pages(device: str, library: Library[PlanFunction]) -> None:
    """The dummy token of an idle group: a page table of width 0 and a cache full of NaN."""
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    step = PagedStep(
        query_start=one,
        kv_lens=one[:1],
        page_table=torch.empty(1, 0, dtype=torch.int32, device=device),
        block_size=4,
        host_query_start=np.array([0, 1], np.int32),
        host_kv_lens=np.zeros(1, np.int32),
    )
    cache = torch.full((4, 1, 2), torch.nan, device=device)
    planned = plan_paged_attention(step, num_kv_heads=1, scale=1.0, library=library)
    assert planned(torch.ones(1, 2, 2, device=device), cache, cache).tolist() == [[[0.0, 0.0], [0.0, 0.0]]]


def test_nan_of_one_sequence_stays_there() -> None:
    case = make_case(
        STEPS["all kinds"], heads=2, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device="cpu"
    )
    clean = attend(case, LIBRARIES[-1])
    flat = int(case.step.page_table[0, 0]) * 4
    case.k_cache[flat], case.v_cache[flat] = torch.nan, torch.nan
    out = attend(case, LIBRARIES[-1])
    assert bool(out[0].isnan().all())
    assert torch.equal(out[1:], clean[1:])


@pytest.mark.parametrize("max_scores", [1, 129, 1000])
def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, max_scores: int) -> None:
    case = make_case(
        STEPS["all kinds"], heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float64, device="cpu"
    )
    whole = attend(case, LIBRARIES[-1])
    monkeypatch.setattr(reference, "_MAX_SCORES", max_scores)
    torch.testing.assert_close(attend(case, LIBRARIES[-1]), whole, rtol=0, atol=1e-14)


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(1, 5), (3, 7)], heads=1, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device="cpu")
    case.q *= 1e4
    out = attend(case, LIBRARIES[-1])
    torch.testing.assert_close(out.double(), formula(case, torch.float64), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([(2, 1)], r"kv_lens \[1\] are below the query lengths \[2\]"),
        ([(1, 9)], r"above the 8 slots of the page table"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lens: list[tuple[int, int]], message: str) -> None:
    case = make_case([(1, 4)], heads=1, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device="cpu")
    wrong = PagedStep(
        query_start=case.step.query_start,
        kv_lens=case.step.kv_lens,
        page_table=case.step.page_table,
        block_size=4,
        host_query_start=np.array([0, lens[0][0]], np.int32),
        host_kv_lens=np.array([lens[0][1]], np.int32),
    )
    with pytest.raises(ValueError, match=message):
        plan_paged_attention(wrong, num_kv_heads=1, scale=1.0, library=LIBRARIES[-1])


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = make_case([(1, 4)], heads=2, kv_heads=1, head_dim=4, block_size=4, dtype=torch.float32, device="cpu")
    planned = plan_paged_attention(case.step, num_kv_heads=1, scale=1.0, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match="shapes of q, k_cache, v_cache"):
        planned(case.q, case.k_cache, case.v_cache[:, :, :2])
    with pytest.raises(ValueError, match=r"cache torch.float64, 1 tokens"):
        planned(case.q, case.k_cache.double(), case.v_cache.double())
    with pytest.raises(ValueError, match="1 tokens"):
        planned(torch.ones(2, 2, 4), case.k_cache, case.v_cache)
