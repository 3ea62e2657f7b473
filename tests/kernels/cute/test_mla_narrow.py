"""Latent decode over caches of E4M3 in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

import math
import re
from collections.abc import Sequence
from functools import partial
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
        for rows in (8, 16, 32, 64)
        for page_size in op.PAGE_SIZES
    ],
)
def test_values_become_the_left_operand_in_registers(rows: int, page_size: int, tmp_path: Path) -> None:
    variant = Variant(rows=rows, page_size=page_size, dtype=torch.bfloat16, narrow=True)
    ptx = op.compiled(variant, f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").__ptx__  # type: ignore[attr-defined]
    for part in (".target sm_90a", "cp.async.bulk.tensor", "ldmatrix.sync", "cvt.rn.f16x2.e4m3x2"):
        assert part in ptx, part
    for kind, start in (("e4m3", "%"), ("f16", "{")):  # a descriptor of shared memory, registers
        operand = re.search(rf"wgmma\.mma_async\S+{kind}\s+\{{[^}}]*\}},\s*(\S)", ptx)
        assert operand and operand[1] == start


@pytest.mark.soak
@pytest.mark.parametrize("page_size", op.PAGE_SIZES)
def test_rounded_products_of_many_rows_are_of_e4m3_alone(page_size: int, tmp_path: Path) -> None:
    variant = Variant(rows=64, page_size=page_size, dtype=torch.bfloat16, narrow=True, rounded=True)
    ptx = op.compiled(variant, f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").__ptx__  # type: ignore[attr-defined]
    products = re.findall(r"wgmma\.mma_async\S+\.f32\.(\S+)\s+\{[^}]*\},\s*(\S)", ptx)
    assert {kind for kind, _ in products} == {"e4m3.e4m3"}
    assert {start for _, start in products} == {"%", "{"}  # scores from shared memory, values from registers


def make(lens: Sequence[int], heads: int, query_len: int, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, cache, table, lens) of sequences in pages in a random order; what no sequence holds is the byte of NaN."""
    generator = torch.Generator("cuda").manual_seed(sum(lens) + heads)
    pages = [-(-length // page_size) for length in lens]
    order = torch.randperm(sum(pages) + 3, generator=generator, device="cuda").int()
    table = torch.full((len(lens), max(1, *pages)), -1, dtype=torch.int32, device="cuda")
    cache = torch.full((len(order) * page_size, 576), 0x7F, dtype=torch.uint8, device="cuda")
    for seq, (length, count) in enumerate(zip(lens, pages, strict=True)):
        table[seq, :count] = order[sum(pages[:seq]) :][:count]
        rows = 3 * torch.randn(length, 576, generator=generator, device="cuda")
        cache[slots(table[seq], length, page_size)] = to_e4m3(rows).view(torch.uint8)
    q = torch.randn(len(lens) * query_len, heads, 576, generator=generator, device="cuda").bfloat16()
    return q, cache.view(torch.float8_e4m3fn), table, torch.tensor(lens, dtype=torch.int32, device="cuda")


def slots(pages: Tensor, length: int, page_size: int) -> Tensor:
    token = torch.arange(length, device=pages.device)
    return pages[token // page_size].long() * page_size + token % page_size


def decode(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lens: Tensor,
    *,
    query_len: int,
    page_size: int,
    cache_scale: Tensor,
    scale: float = SCALE,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    out = torch.full((*q.shape[:2], 512), float("nan"), dtype=q.dtype, device=q.device)
    lse = op.mla_decode(
        q,
        cache,
        table,
        lens,
        page_size=page_size,
        query_len=query_len,
        scale=scale,
        workspace=op.Workspace(op.choose_rows(q.shape[1] * query_len), q.device),
        out=out,
        cache_scale=cache_scale,
        rounded=rounded,
    )
    return out, lse.view(q.shape[:2])


def check(
    lens: Sequence[int],
    heads: int,
    query_len: int,
    page_size: int,
    scale: float = 0.5,
    *,
    rounded: bool = False,
    launches: int = 1,
) -> None:
    """Errors are at most twice those of torch where it rounds the same: weights if at all, results to bfloat16.

    Logarithms are off by no more than scores, see cut_scores. All launches give the same bits.
    """
    q, cache, table, kv_lens = make(lens, heads, query_len, page_size)
    run = partial(
        decode,
        *(q, cache, table, kv_lens),
        query_len=query_len,
        page_size=page_size,
        cache_scale=torch.tensor([scale], device="cuda"),
        rounded=rounded,
    )
    out, lse = run()
    for _ in range(launches - 1):
        assert all(torch.equal(a, b) for a, b in zip(run(), (out, lse), strict=True))
    if rounded:
        powers = powers_of(q)
        q = to_e4m3(q * powers).double() / powers
    for seq, length in enumerate(lens):
        rows = slice(seq * query_len, (seq + 1) * query_len)
        if length == 0:
            assert (out[rows] == 0).all() and lse[rows].isneginf().all()
            continue
        kv = cache.view(torch.uint8)[slots(table[seq], length, page_size)].view(cache.dtype).double()
        exact = torch.einsum("qhd,kd->qhk", q[rows].double(), kv)
        error = (cut_scores(q[rows].double(), kv) - exact).abs().amax().item() * scale * SCALE / math.log(2)
        scores = exact * (scale * SCALE)
        seen = length - query_len + 1 + torch.arange(query_len, device="cuda")
        hidden = torch.arange(length, device="cuda")[None] >= seen[:, None]
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        expected = scores.softmax(2) @ kv[:, :512] * scale
        same = expected
        if rounded and heads * query_len > 32:
            weights = 2.0 ** ((scores - scores.amax(2, keepdim=True)) / math.log(2) + 6)
            same = to_e4m3(weights).double() @ kv[:, :512] * scale / weights.sum(2, keepdim=True)
        limit = 2 * (same.bfloat16().double() - expected).norm()
        assert (out[rows].double() - expected).norm() <= limit, (seq, length)
        log = scores.logsumexp(2) / math.log(2)
        torch.testing.assert_close(lse[rows].double(), log, rtol=0, atol=2 * error + 2e-5)


def cut_scores(q: Tensor, kv: Tensor) -> Tensor:
    """Scores [query, head, key] by sums as the matrix units make them, see mla_narrow_keys."""
    powers = powers_of(q)
    large = to_e4m3(q * powers).double()
    parts = to_e4m3(q * powers - large).double(), large
    total = torch.zeros(*q.shape[:2], len(kv), dtype=torch.float64, device=q.device)
    for first in range(0, 576, 192):
        sums = torch.zeros_like(total)
        for part in parts:
            for dim in range(first, first + 192, 32):
                products = part[:, :, None, dim : dim + 32] * kv[:, dim : dim + 32]
                sums = cut_sum(torch.cat([sums[..., None], products], 3))
        total += sums
    return total / powers


def cut_sum(numbers: Tensor) -> Tensor:
    """Over the last dim, of numbers that are cut 13 bits behind the largest one."""
    units = 2.0 ** (numbers.abs().amax(-1, keepdim=True).clamp_min(2.0**-99).log2().floor() - 13)
    return ((numbers / units).trunc() * units).sum(-1)


def powers_of(q: Tensor) -> Tensor:
    """What makes a row's largest number 128 to 256."""
    return 2 ** (7 - q.double().abs().amax(2, keepdim=True).log2().floor())


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("batch", [64, 128])
def test_many_turns_of_the_ring(batch: int, query_len: int) -> None:
    """Were a slot read before it is full, then seldom, and where many tiles follow each other."""
    check([8192] * batch, 16, query_len, 64, launches=20)


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
        ([70, 0, 5000], 32, 1, 64),
        ([900, 1, 64, 2500], 128, 1, 64),
        ([8193], 128, 1, 16),
        ([300, 5], 64, 4, 128),
        ([idx * 97 % 900 for idx in range(130)], 128, 1, 64),
    ],
)
def test_against_float64(lens: list[int], heads: int, query_len: int, page_size: int) -> None:
    check(lens, heads, query_len, page_size)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_what_is_rounded_to_e4m3(heads: int) -> None:
    check([700, 3, 64, 8193], heads, 1, 64, rounded=True)


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


@pytest.mark.gpu
def test_the_scale_is_read_on_the_device() -> None:
    check([700, 3], 16, 1, 64, scale=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_every_byte_widens_exactly(heads: int) -> None:
    """One key a sequence, whose weight is 1: the output is the key."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    cache = codes.repeat(64, 3)[:, :576].contiguous().view(torch.float8_e4m3fn).cuda()
    out, _ = decode_one_key(cache, heads)
    assert torch.equal(out[0].float(), cache[0, :512].float().expand(heads, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_nan_of_a_key_shows(heads: int) -> None:
    cache = torch.full((64, 576), 0x38, dtype=torch.uint8, device="cuda")
    cache[0, 3] = 0x7F
    out, _ = decode_one_key(cache.view(torch.float8_e4m3fn), heads)
    assert out[0, :, 3].isnan().all()


def decode_one_key(cache: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(1, dtype=torch.int32, device="cuda")
    q = torch.zeros(1, heads, 576, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, device="cuda")
    return decode(q, cache, table, lens, query_len=1, page_size=64, cache_scale=one)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_queries_of_any_size(size: float, heads: int) -> None:
    """Rows of very different sizes; the scale undoes it, so that the weights are those of ordinary queries."""
    q, cache, table, lens = make([700, 64], heads, 1, 64)
    one = torch.ones(1, device="cuda")
    sizes = torch.full((1, heads, 1), size, device="cuda")
    small, _ = decode(q, cache, table, lens, query_len=1, page_size=64, cache_scale=one)
    big, _ = decode(
        (q * sizes).bfloat16(), cache, table, lens, query_len=1, page_size=64, cache_scale=one, scale=SCALE / size
    )
    assert (big.double() - small.double()).norm() <= 0.02 * small.double().norm()
