"""Latent decode in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.cute import mla_decode as op

SCALE = 192**-0.5


@pytest.mark.parametrize(("rows", "page_size"), [(16, 64), (64, 16)])
def test_variants_compile_without_a_gpu(rows: int, page_size: int, tmp_path: Path) -> None:
    variant = op.Variant(rows=rows, page_size=page_size, dtype=torch.bfloat16)
    ptx = op.compiled(variant, f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert re.search(r"ld\.global\.v(4\.[bf]32|2\.[bf]64)", ptx)  # 16 bytes of a part
    assert "griddepcontrol.wait" in ptx


def test_rows_are_padded_to_a_variant() -> None:
    assert [op.choose_rows(rows) for rows in (1, 8, 9, 32, 33, 64, 65, 1024)] == [8, 8, 16, 32, 64, 64, 64, 64]


def test_what_no_variant_takes_is_refused() -> None:
    q, rows = torch.zeros(2, 16, 576, dtype=torch.bfloat16), torch.zeros(64, 576, dtype=torch.bfloat16)
    table, lens = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    out = torch.zeros(2, 16, 512, dtype=torch.bfloat16)

    def run(q: Tensor = q, rows: Tensor = rows, out: Tensor = out, page_size: int = 64, query_len: int = 1) -> None:
        space = op.Workspace.__new__(op.Workspace)
        op.mla_decode(
            q, rows, table, lens, page_size=page_size, query_len=query_len, scale=1.0, workspace=space, out=out
        )

    for wrong in (
        {"page_size": 24},
        {"query_len": 2},
        {"q": q.float()},
        {"q": q[..., :512].contiguous()},
        {"out": out[..., :256].contiguous()},
        {"q": torch.zeros(2, 129, 576, dtype=torch.bfloat16)},
    ):
        with pytest.raises(ValueError, match="mla_decode: q"):
            run(**wrong)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences in pages that stand in a random order; whatever no sequence holds is NaN."""

    q: Tensor
    rows: Tensor
    table: Tensor
    lens: Tensor
    page_size: int
    query_len: int

    @classmethod
    def make(cls, lens: Sequence[int], heads: int, query_len: int, page_size: int, dtype: torch.dtype) -> "Case":
        generator = torch.Generator().manual_seed(sum(lens) + heads)
        pages = [-(-length // page_size) for length in lens]
        order = torch.randperm(sum(pages) + 3, generator=generator).int()
        table = torch.full((len(lens), max(1, *pages)), -1, dtype=torch.int32)
        rows = torch.full((len(order) * page_size, 576), float("nan"), dtype=dtype)
        for seq, (length, count) in enumerate(zip(lens, pages, strict=True)):
            table[seq, :count] = order[sum(pages[:seq]) :][:count]
            rows[cls._slots(table[seq], length, page_size)] = torch.randn(length, 576, generator=generator).to(dtype)
        q = torch.randn(len(lens) * query_len, heads, 576, generator=generator).to(dtype)
        return cls(
            q=q.cuda(),
            rows=rows.cuda(),
            table=table.cuda(),
            lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
            page_size=page_size,
            query_len=query_len,
        )

    @staticmethod
    def _slots(pages: Tensor, length: int, page_size: int) -> Tensor:
        token = torch.arange(length, device=pages.device)
        return pages[token // page_size].long() * page_size + token % page_size

    def run(self, space: op.Workspace) -> tuple[Tensor, Tensor]:
        """(out [S * Q, N, 512], lse [S * Q, N])."""
        out = torch.full((*self.q.shape[:2], 512), float("nan"), dtype=self.q.dtype, device="cuda")
        space.out.fill_(float("nan"))
        lse = op.mla_decode(
            self.q,
            self.rows,
            self.table,
            self.lens,
            page_size=self.page_size,
            query_len=self.query_len,
            scale=SCALE,
            workspace=space,
            out=out,
        )
        return out, lse.view(self.q.shape[:2])

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same in float64."""
        outs, lses = [], []
        for seq, length in enumerate(self.lens.tolist()):
            q = self.q[seq * self.query_len :][: self.query_len].double()
            kv = self.rows[self._slots(self.table[seq], length, self.page_size)].double()
            seen = length - self.query_len + 1 + torch.arange(self.query_len, device="cuda")
            scores = torch.einsum("qhd,kd->qhk", q, kv) * SCALE
            hidden = torch.arange(length, device="cuda")[None] >= seen[:, None]
            scores = scores.masked_fill(hidden[:, None], -math.inf)
            weights = scores.softmax(2) if length else scores
            outs.append(weights @ kv[:, :512])
            lses.append(scores.logsumexp(2) / math.log(2))
        return torch.cat(outs), torch.cat(lses)


def check(case: Case, space: op.Workspace) -> None:
    out, lse = case.run(space)
    expected, expected_lse = case.expected()
    norm = expected.norm().clamp_min(1e-30)
    rounded = (expected.to(out.dtype).double() - expected).norm() / norm
    assert (out.double() - expected).norm() / norm <= 2 * rounded + 1e-9
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isneginf(), ~seen)
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], rtol=0, atol=2e-5)
    assert (out[~seen] == 0).all()


CASES = [
    # lengths, heads, query tokens, page size
    ([64], 16, 1, 64),
    ([1], 1, 1, 16),
    ([1000], 6, 1, 128),
    ([65, 0, 1000], 16, 1, 64),
    ([8193, 63, 64, 1], 16, 1, 16),
    ([idx * 97 % 3000 for idx in range(33)], 16, 1, 64),
    ([idx * 37 % 900 for idx in range(150)], 16, 1, 32),
    ([131072, 5], 16, 1, 64),
    ([100, 3000, 17, 2, 513], 16, 2, 64),
    ([9, 700, 8], 4, 8, 64),
    ([4, 65, 1000, 64, 700], 16, 4, 128),
    ([1000, 0, 64], 128, 1, 64),
    ([idx * 97 % 3000 for idx in range(33)], 96, 1, 16),
    ([8, 65, 1000, 64, 7000], 128, 8, 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("lens", "heads", "query_len", "page_size"), CASES)
def test_against_float64(lens: list[int], heads: int, query_len: int, page_size: int) -> None:
    space = op.Workspace(op.choose_rows(heads * query_len), torch.device("cuda"))
    check(Case.make(lens, heads, query_len, page_size, torch.bfloat16), space)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64])
def test_float16(heads: int) -> None:
    space = op.Workspace(op.choose_rows(heads), torch.device("cuda"))
    check(Case.make([700, 3], heads, 1, 64, torch.float16), space)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_graph_follows_lengths_and_tables(heads: int) -> None:
    space = op.Workspace(op.choose_rows(heads), torch.device("cuda"))
    cases = [Case.make(lens, heads, 1, 64, torch.bfloat16) for lens in ([5, 900, 64], [3000, 0, 1], [64, 64, 129])]
    width = max(case.table.shape[1] for case in cases)
    size = max(len(case.rows) for case in cases)
    static = Case(
        q=torch.zeros_like(cases[0].q),
        rows=torch.zeros(size, 576, dtype=torch.bfloat16, device="cuda"),
        table=torch.zeros(3, width, dtype=torch.int32, device="cuda"),
        lens=torch.ones(3, dtype=torch.int32, device="cuda"),
        page_size=64,
        query_len=1,
    )
    static.run(space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = static.run(space)
    for case in (*cases, cases[0]):
        static.q.copy_(case.q)
        static.rows[: len(case.rows)].copy_(case.rows)
        static.table.fill_(-1)[:, : case.table.shape[1]].copy_(case.table)
        static.lens.copy_(case.lens)
        graph.replay()
        once_out, once_lse = case.run(space)
        assert torch.equal(out, once_out)
        assert torch.equal(lse, once_lse)
