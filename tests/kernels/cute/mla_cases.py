"""Inputs of a latent decode, what float64 makes of them, and the bound on what a kernel may."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_infer.kernels.cute import mla_decode as op
from dist_infer.kernels.cute.mla_parts import EMPTY

SCALE = 192**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sequences in pages that stand in a random order; whatever no sequence holds is NaN."""

    q: Tensor
    rows: Tensor
    table: Tensor
    lens: Tensor
    page_size: int
    query_len: int
    layers: int = 1
    layer: int = 0

    @classmethod
    def make(
        cls,
        lens: Sequence[int],
        *,
        heads: int = 16,
        query_len: int = 1,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        layers: int = 1,
        layer: int = 0,
    ) -> "Case":
        """On the GPU; of a pool with `layers` side by side, the values of `layer`."""
        generator = torch.Generator("cuda").manual_seed(sum(lens) + heads)
        pages = [-(-length // page_size) for length in lens]
        order = torch.randperm(sum(pages) + 3, generator=generator, device="cuda").int()
        table = torch.full((len(lens), max(1, *pages)), -1, dtype=torch.int32, device="cuda")
        rows = torch.full((len(order) * page_size * layers, 576), float("nan"), dtype=dtype, device="cuda")
        case = cls(
            q=torch.randn(len(lens) * query_len, heads, 576, generator=generator, device="cuda").to(dtype),
            rows=rows,
            table=table,
            lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
            page_size=page_size,
            query_len=query_len,
            layers=layers,
            layer=layer,
        )
        for seq, (length, count) in enumerate(zip(lens, pages, strict=True)):
            table[seq, :count] = order[sum(pages[:seq]) :][:count]
            rows[case.slots(seq, length)] = torch.randn(length, 576, generator=generator, device="cuda").to(dtype)
        return case

    def slots(self, seq: int, length: int) -> Tensor:
        """Where the tokens of a sequence are."""
        token = torch.arange(length, device=self.table.device)
        pages = self.table[seq, token // self.page_size].long() * self.layers + self.layer
        return pages * self.page_size + token % self.page_size

    def workspace(self) -> op.Workspace:
        """One that holds this case."""
        return op.Workspace(op.choose_rows(self.q.shape[1] * self.query_len), self.q.device)

    def run(self, space: op.Workspace, num_workers: int | None = None) -> tuple[Tensor, Tensor]:
        """(out [S * Q, N, 512], lse [S * Q, N]); what the launch should write is NaN before."""
        out = torch.full((*self.q.shape[:2], 512), float("nan"), dtype=self.q.dtype, device="cuda")
        lse = torch.full((self.q.shape[0] * self.q.shape[1],), float("nan"), device="cuda")
        op.mla_decode(
            self.q,
            self.rows,
            self.table,
            self.lens,
            page_size=self.page_size,
            query_len=self.query_len,
            scale=SCALE,
            workspace=space,
            out=out,
            lse=lse,
            layers=self.layers,
            layer=self.layer,
            num_workers=num_workers,
        )
        return out, lse.view(self.q.shape[:2])

    def expected(self) -> tuple[Tensor, Tensor]:
        """The same in float64."""
        outs, lses = [], []
        for seq, length in enumerate(self.lens.tolist()):
            q = self.q[seq * self.query_len :][: self.query_len].double()
            kv = self.rows[self.slots(seq, length)].double()
            seen = length - self.query_len + 1 + torch.arange(self.query_len, device="cuda")
            scores = torch.einsum("qhd,kd->qhk", q, kv) * SCALE
            hidden = torch.arange(length, device="cuda")[None] >= seen[:, None]
            scores = scores.masked_fill(hidden[:, None], -math.inf)
            weights = scores.softmax(2).nan_to_num(0.0) if length else scores  # a row may see nothing
            outs.append(weights @ kv[:, :512])
            lses.append(scores.logsumexp(2) / math.log(2))
        return torch.cat(outs), torch.cat(lses)


def check(case: Case, space: op.Workspace, num_workers: int | None = None) -> None:
    """At most twice the error of rounding the right result to its dtype, and a workspace fit for the next launch."""
    out, lse = case.run(space, num_workers)
    expected, expected_lse = case.expected()
    norm = expected.norm().clamp_min(1e-30)
    rounded = (expected.to(out.dtype).double() - expected).norm() / norm
    assert (out.double() - expected).norm() / norm <= 2 * rounded + 1e-9
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isneginf(), ~seen)
    torch.testing.assert_close(lse[seen].double(), expected_lse[seen], rtol=0, atol=2e-5)
    assert (out[~seen] == 0).all()
    check_left(space)


def check_left(space: op.Workspace) -> None:
    """What a launch leaves to the next one."""
    assert not space.states.any()
    assert (space.parts == EMPTY).all()
