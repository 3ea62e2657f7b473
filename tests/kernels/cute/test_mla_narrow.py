"""Latent decode over caches of E4M3 in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.cute import mla_decode as op
from dist_infer.kernels.cute.mla_launch import Variant
from dist_infer.kernels.reference.quantize import to_e4m3

SCALE = 192**-0.5


@pytest.mark.parametrize(
    ("rows", "page_size"),
    [
        pytest.param(rows, page_size, marks=() if (rows, page_size) == (16, 64) else pytest.mark.soak)
        for rows in (8, 16)
        for page_size in op.PAGE_SIZES
    ],
)
def test_tiles_are_widened_by_16_bytes(rows: int, page_size: int, tmp_path: Path) -> None:
    variant = Variant(rows=rows, page_size=page_size, dtype=torch.bfloat16, narrow=True)
    ptx = op.compiled(variant, f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").__ptx__  # type: ignore[attr-defined]
    for part in (".target sm_90a", "wgmma.mma_async", "cp.async.bulk.tensor", "mul.rn.bf16x2"):
        assert part in ptx, part
    assert "ld.shared.v4" in ptx and "st.shared.v4" in ptx


def make(lens: Sequence[int], heads: int, query_len: int, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, cache, table, lens) of sequences in pages in a random order; what no sequence holds is the byte of NaN."""
    generator = torch.Generator().manual_seed(sum(lens) + heads)
    pages = [-(-length // page_size) for length in lens]
    order = torch.randperm(sum(pages) + 3, generator=generator).int()
    table = torch.full((len(lens), max(1, *pages)), -1, dtype=torch.int32)
    cache = torch.full((len(order) * page_size, 576), 0x7F, dtype=torch.uint8)
    for seq, (length, count) in enumerate(zip(lens, pages, strict=True)):
        table[seq, :count] = order[sum(pages[:seq]) :][:count]
        rows = 3 * torch.randn(length, 576, generator=generator)
        cache[slots(table[seq], length, page_size)] = to_e4m3(rows).view(torch.uint8)
    q = torch.randn(len(lens) * query_len, heads, 576, generator=generator).bfloat16()
    return q.cuda(), cache.view(torch.float8_e4m3fn).cuda(), table.cuda(), torch.tensor(lens, dtype=torch.int32).cuda()


def slots(pages: Tensor, length: int, page_size: int) -> Tensor:
    token = torch.arange(length, device=pages.device)
    return pages[token // page_size].long() * page_size + token % page_size


def decode(
    q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, *, query_len: int, page_size: int, cache_scale: Tensor
) -> tuple[Tensor, Tensor]:
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=q.dtype, device=q.device)
    lse = op.mla_decode(
        q,
        cache,
        table,
        lens,
        page_size=page_size,
        query_len=query_len,
        scale=SCALE,
        workspace=op.Workspace(op.choose_rows(q.shape[1] * query_len, narrow=True), q.device),
        out=out,
        cache_scale=cache_scale,
    )
    return out, lse.view(q.shape[:2])


def check(lens: Sequence[int], heads: int, query_len: int, page_size: int, scale: float = 0.5) -> None:
    q, cache, table, kv_lens = make(lens, heads, query_len, page_size)
    cache_scale = torch.tensor([scale], device="cuda")
    out, lse = decode(q, cache, table, kv_lens, query_len=query_len, page_size=page_size, cache_scale=cache_scale)
    for seq, length in enumerate(lens):
        rows = slice(seq * query_len, (seq + 1) * query_len)
        kv = cache.view(torch.uint8)[slots(table[seq], length, page_size)].view(cache.dtype).double() * scale
        scores = torch.einsum("qhd,kd->qhk", q[rows].double(), kv) * SCALE
        seen = length - query_len + 1 + torch.arange(query_len, device="cuda")
        hidden = torch.arange(length, device="cuda")[None] >= seen[:, None]
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        if length == 0:
            assert (out[rows] == 0).all() and lse[rows].isneginf().all()
            continue
        expected = scores.softmax(2) @ kv[:, :512]
        rounded = (expected.bfloat16().double() - expected).norm()
        assert (out[rows].double() - expected).norm() <= 2 * rounded, (seq, length)
        log = scores.logsumexp(2) / math.log(2)
        torch.testing.assert_close(lse[rows].double(), log, rtol=0, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lens", "heads", "query_len", "page_size"),
    [
        ([64], 16, 1, 64),
        ([1], 1, 1, 16),
        ([1000], 6, 1, 128),
        ([65, 0, 1000], 16, 1, 64),
        ([8193, 63, 64, 1], 16, 1, 16),
        ([idx * 97 % 3000 for idx in range(33)], 16, 1, 64),
        ([131072, 5], 16, 1, 64),
        ([100, 3000, 17, 2, 513], 8, 2, 32),
        ([9, 700, 8], 4, 8, 64),
    ],
)
def test_against_float64(lens: list[int], heads: int, query_len: int, page_size: int) -> None:
    check(lens, heads, query_len, page_size)


def test_a_cache_and_its_scale_belong_together() -> None:
    q, table = torch.zeros(1, 16, 576, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    lens, out = torch.ones(1, dtype=torch.int32), torch.zeros(1, 16, 512, dtype=torch.bfloat16)
    space = op.Workspace.__new__(op.Workspace)
    wide = torch.zeros(64, 576, dtype=torch.bfloat16)
    for cache, scale in ((wide, torch.ones(1)), (wide.to(torch.float8_e4m3fn), None)):
        with pytest.raises(ValueError, match="a cache of E4M3 needs its scale"):
            op.mla_decode(
                q,
                cache,
                table,
                lens,
                page_size=64,
                query_len=1,
                scale=1.0,
                workspace=space,
                out=out,
                cache_scale=scale,
            )
    assert [op.choose_rows(rows, narrow=True) for rows in (1, 8, 9, 16, 17, 128)] == [8, 8, 16, 16, 16, 16]


@pytest.mark.gpu
def test_the_scale_is_read_on_the_device() -> None:
    check([700, 3], 16, 1, 64, scale=0.3)


@pytest.mark.gpu
def test_every_byte_widens_exactly() -> None:
    """One key a sequence, whose weight is 1: the output is the key. The byte of NaN, of either sign, is 480 here."""
    cache = torch.arange(256, dtype=torch.uint8).repeat(64, 3)[:, :576].contiguous().view(torch.float8_e4m3fn).cuda()
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(1, dtype=torch.int32, device="cuda")
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, device="cuda")
    out, _ = decode(q, cache, table, lens, query_len=1, page_size=64, cache_scale=one)
    expected = cache[0, :512].float()
    expected = torch.where(expected.isnan(), 480 * (1 - 2 * (cache.view(torch.uint8)[0, :512] >> 7).float()), expected)
    assert torch.equal(out[0].float(), expected.expand(16, -1))
