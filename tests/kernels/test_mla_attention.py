"""Latent attention: prefill, extend and decode in one step, against plain attention on expanded keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.mla_attention import LIBRARIES, PlanFunction, plan_mla_attention
from dist_infer.kernels.reference import mla_attention as reference
from tests.devices import DEVICES
from tests.yardstick import check_error

N, P, R, V, L = 3, 10, 4, 6, 12  # heads, plain, rotated, value and latent channels
SCALE = 0.3
BLOCK_SIZE = 4
# (query length, key length) of each sequence
STEPS = {
    "nothing": [],
    "one empty": [(1, 0)],
    "decode": [(1, 1), (1, 63), (1, 129), (1, 64), (1, 65), (1, 0)],
    "prefill": [(63, 63), (2, 2), (129, 129)],
    "extend": [(63, 129), (2, 63), (128, 129)],
    "all kinds": [(1, 129), (63, 63), (1, 0), (1, 1), (17, 129), (1, 63), (2, 2)],
}


@dataclass
class Case:
    step: PagedStep
    q: Tensor
    cache: Tensor
    kv_b: Tensor
    rows: list[Tensor]  # [kv_len, L + R] of each sequence
    lens: Sequence[tuple[int, int]]


def make_case(lens: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float64, device: str = "cpu") -> Case:
    """What no sequence owns is NaN: unused pages and the rest of last pages."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    num_pages = [-(-kv_len // BLOCK_SIZE) for _, kv_len in lens]
    owners = torch.randperm(sum(num_pages) + 2, generator=generator).tolist()
    page_table = np.full((len(lens), max(num_pages, default=0) + 1), -1, np.int32)
    cache = torch.full((len(owners) * BLOCK_SIZE, L + R), torch.nan, dtype=dtype, device=device)
    rows = []
    for table, (_, kv_len), count in zip(page_table, lens, num_pages, strict=True):
        table[:count] = [owners.pop() for _ in range(count)]
        rows.append(random(kv_len, L + R))
        cache[[int(table[i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(kv_len)]] = rows[-1]
    query_start = np.concatenate(([0], np.cumsum([n for n, _ in lens]))).astype(np.int32)
    kv_lens = np.array([n for _, n in lens], np.int32)
    step = PagedStep(
        query_start=torch.from_numpy(query_start).to(device),
        kv_lens=torch.from_numpy(kv_lens).to(device),
        page_table=torch.from_numpy(page_table).to(device),
        block_size=BLOCK_SIZE,
        host_query_start=query_start,
        host_kv_lens=kv_lens,
    )
    return Case(step, random(int(query_start[-1]), N, P + R), cache, random(N, P + V, L), rows, lens)


def dense(case: Case, dtype: torch.dtype) -> Tensor:
    """Head by head, query by query, with keys and values made of the latents."""
    out = torch.zeros(len(case.q), N, V, dtype=dtype, device=case.q.device)
    row = 0
    for (num_queries, kv_len), cached in zip(case.lens, case.rows, strict=True):
        latent, rotated = cached.to(dtype).split_with_sizes((L, R), 1)
        for query in range(num_queries):
            seen = kv_len - num_queries + query + 1
            for head in range(N if kv_len else 0):
                made = latent[:seen] @ case.kv_b[head].to(dtype).T
                keys = torch.cat([made[:, :P], rotated[:seen]], 1)
                weights = (keys @ case.q[row, head].to(dtype) * SCALE).softmax(0)
                out[row, head] = weights @ made[:, P:]
            row += 1
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize(
    ("lens", "dtype"),
    [*((name, torch.float64) for name in STEPS), ("all kinds", torch.float32), ("all kinds", torch.bfloat16)],
)
def test_against_expanded_keys(device: str, library: Library[PlanFunction], lens: str, dtype: torch.dtype) -> None:
    case = make_case(STEPS[lens], dtype, device)
    attend = plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE, library=library)
    out = attend(case.q, case.cache, case.kv_b)
    assert out.is_contiguous()
    truth = dense(case, torch.float64)
    check_error(out, truth, truth.float().to(dtype) if dtype == torch.bfloat16 else dense(case, dtype))


@pytest.mark.parametrize("max_absorbed", [0, 1, 2, 1000])
def test_absorbed_and_expanded_agree(max_absorbed: int) -> None:
    case = make_case(STEPS["all kinds"])
    attend = reference.plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE, max_absorbed=max_absorbed)
    torch.testing.assert_close(attend(case.q, case.cache, case.kv_b), dense(case, torch.float64), rtol=0, atol=1e-12)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(STEPS["extend"])
    monkeypatch.setattr(reference, "_MAX_SCORES", 300)
    attend = reference.plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE)
    torch.testing.assert_close(attend(case.q, case.cache, case.kv_b), dense(case, torch.float64), rtol=0, atol=1e-12)


def test_a_past_of_zero_is_seen() -> None:
    """The planted fault: new tokens only, as if nothing were cached."""
    case = make_case([(5, 9)])
    forgetful = replace(case.step, kv_lens=case.step.kv_lens - 4, host_kv_lens=case.step.host_kv_lens - 4)
    attend = reference.plan_mla_attention(forgetful, kv_lora_rank=L, scale=SCALE)
    assert (attend(case.q, case.cache, case.kv_b) - dense(case, torch.float64)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("lens", "message"),
    [([(3, 2)], "are below the query lengths"), ([(1, 9)], "are above the 8 slots")],
)
def test_steps_that_cannot_be_are_refused(lens: list[tuple[int, int]], message: str) -> None:
    case = make_case(lens)
    step = replace(case.step, page_table=case.step.page_table[:, :2])
    with pytest.raises(ValueError, match=message):
        plan_mla_attention(step, kv_lora_rank=L, scale=SCALE, library=LIBRARIES[-1])


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = make_case([(2, 5)])
    attend = plan_mla_attention(case.step, kv_lora_rank=L, scale=SCALE, library=LIBRARIES[-1])
    attend(case.q, case.cache, case.kv_b)
    for q, cache, kv_b in (
        (case.q[:1], case.cache, case.kv_b),
        (case.q[:, :2], case.cache, case.kv_b),
        (case.q, case.cache[:, :L], case.kv_b),
        (case.q, case.cache, case.kv_b[..., :5]),
        (case.q.float(), case.cache, case.kv_b),
    ):
        with pytest.raises(ValueError, match="don't fit a latent of 12 and 2 tokens"):
            attend(q, cache, kv_b)
