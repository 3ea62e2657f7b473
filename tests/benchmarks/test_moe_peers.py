"""How weights and rows come to peers of the experts; their kernels are made up here."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks import moe_peers as peers
from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation

E, K, D, I = 3, 2, 256, 128  # noqa: E741 - the letters of the module


def narrow(rows: int, width: int) -> Fp8Tensor:
    data = torch.randn(E * rows, width).to(torch.float8_e4m3fn)
    scales = torch.rand(E * rows // 128, width // 128)
    return Fp8Tensor(data=data, scales=scales, scaling=Fp8Scaling.BLOCKS_128X128, shape=(E * rows, width))


def test_scales_of_blocks_come_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[object, ...], dict[str, Tensor]]] = []

    def run(*given: Tensor, **options: Tensor) -> Tensor:
        seen.append((given, options))
        return given[0]

    monkeypatch.setattr(peers, "fused_moe", lambda _: SimpleNamespace(fused_experts_impl=run))
    experts = peers.triton_experts(None, GatedActivation.SWIGLUOAI)
    x, ids, factors = torch.randn(2, D), torch.zeros(2, K, dtype=torch.int32), torch.ones(2, K)
    up, down = narrow(2 * I, D), narrow(D, I)
    experts(x, ids, factors, up, down)
    experts(x, ids, factors, torch.randn(E, 2 * I, D), torch.randn(E, D, I))
    (blocks, options), (plain, none) = seen
    assert [tuple(part.shape) for part in blocks[1:3] if isinstance(part, Tensor)] == [(E, 2 * I, D), (E, D, I)]
    assert options["w1_scale"].shape == (E, 2, 2) and options["w2_scale"].shape == (E, 2, 1)
    assert torch.equal(options["w1_scale"].reshape(-1, 2), up.scales)
    assert plain[-1] == "swigluoai" and plain[3] is factors and not none


def test_rows_of_experts_stand_as_deep_gemm_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.rand(300, E).argsort(1)[:, :K]
    counts = ids.flatten().bincount(minlength=E)
    tails: list[Tensor] = []

    def product(x: Tensor, weight: Tensor, out: Tensor, tail: Tensor) -> None:
        assert x.shape[-1] == weight.shape[-1] and out.shape[-1] == weight.shape[1] and x.shape[:-1] == out.shape[:-1]
        tails.append(tail)

    monkeypatch.setattr(peers, "deep_gemm", lambda _: SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=product))
    out = peers.deep_gemm_products(None, ids, torch.randn(E, 2 * I, D), torch.randn(E, D, I))()
    assert out.shape[-1] == D and len(tails) == 2
    real = tails[0][tails[0] >= 0].long()
    assert torch.equal(real.bincount(minlength=E), counts) and len(tails[0]) == len(out)
    assert all(bool((part == part[0])[part >= 0].all()) for part in tails[0].view(-1, 128))  # a block has one expert
