"""Grouped products in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute import grouped_gemm as op
from dist_infer.kernels.cute.grouped_gemm_parts import Variant
from dist_infer.kernels.reference.silu_mul import silu_mul

TOP_K = 3


def variant(activation: GatedActivation | None) -> Variant:
    return Variant(
        activation=activation,
        sizes=(16, 40, 48),
        num_stages=4,
        dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("activation", [GatedActivation.SILU, GatedActivation.SWIGLUOAI, None])
def test_variants_compile_without_a_gpu(activation: GatedActivation | None, tmp_path: Path) -> None:
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}"
    ptx = op.compiled(variant(activation), options).__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx
    assert "wgmma.mma_async.sync.aligned.m64n48k16" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == (activation is not None)  # rows are gathered by 16 bytes
    assert "stmatrix" in ptx and "st.global.v4.b32" in ptx
    assert "ld.local" not in ptx


def test_what_no_variant_takes_is_refused() -> None:
    order, firsts = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    rows, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(2, 128, 64, dtype=torch.bfloat16)
    wide = torch.zeros(4, 96, dtype=torch.bfloat16), torch.zeros(2, 128, 96, dtype=torch.bfloat16)
    many = rows, torch.zeros(257, 128, 64, dtype=torch.bfloat16)
    for wrong in ((rows.half(), weight), (rows, weight[:, :96]), wide, many):
        with pytest.raises(ValueError, match="down: rows"):
            op.down(*wrong, order, firsts, variant(None))
        with pytest.raises(ValueError, match="gate_up: rows"):
            op.gate_up(*wrong, order, firsts, TOP_K, variant(GatedActivation.SILU))


def ragged(counts: list[int], num_dead: int) -> tuple[Tensor, Tensor]:
    """(order, firsts) of rows in a random order, and pairs behind them that no expert has."""
    generator = torch.Generator().manual_seed(len(counts))
    total = sum(counts)
    num_rows = -(-(total + num_dead) // TOP_K)
    order = torch.randperm(num_rows * TOP_K, generator=generator).int()
    firsts = torch.tensor([0, *counts]).cumsum(0).int()
    order[total:] = torch.iinfo(torch.int32).max
    return order.cuda(), firsts.cuda()


def normal(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(shape[0])
    return torch.randn(shape, generator=generator, device="cuda").div_(shape[-1] ** 0.5).bfloat16()


def check(out: Tensor, truth: Tensor) -> None:
    """Sums of fewer than 2^11 products in float32, rounded once."""
    assert (out.double() - truth).abs().max() <= 2**-8 * truth.abs().max()
    wrong = (out != truth.bfloat16()).double().mean()
    assert wrong < 0.02, f"{wrong:.1%} of the values are not the truth rounded once"


COUNTS = [
    ([1], 0),
    ([0, 16, 0, 0, 17, 0], 5),
    ([48, 49, 95, 96, 97, 0, 1, 15], 100),
    ([1000], 3),
    ([0] * 255 + [33], 0),
    ([idx * 37 % 130 for idx in range(256)], 11),
]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", list(GatedActivation))
@pytest.mark.parametrize(("counts", "num_dead"), COUNTS)
def test_gate_up_against_float64(counts: list[int], num_dead: int, activation: GatedActivation) -> None:
    order, firsts = ragged(counts, num_dead)
    inner, width = 192, 320
    x, weight = normal(len(order) // TOP_K, width) * width**0.5 * 4, normal(len(counts), 2 * inner, width)
    out = op.gate_up(x, weight, order, firsts, TOP_K, variant(activation))
    ends = firsts.tolist()
    rows = x[(order[: ends[-1]] // TOP_K).long()].double()
    truth = torch.empty(ends[-1], inner, dtype=torch.float64, device="cuda")
    for expert, matrix in enumerate(weight.double()):
        part = slice(ends[expert], ends[expert + 1])
        truth[part] = silu_mul(rows[part] @ matrix.T, activation)
    check(out[: ends[-1]], truth)


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "num_dead"), COUNTS)
def test_down_against_float64(counts: list[int], num_dead: int) -> None:
    order, firsts = ragged(counts, num_dead)
    inner, width = 192, 320
    hidden, weight = normal(len(order), inner) * inner**0.5, normal(len(counts), width, inner)
    ends = firsts.tolist()
    hidden[ends[-1] :] = float("nan")
    out = op.down(hidden, weight, order, firsts, variant(None))
    pairs = order[: ends[-1]].long()
    truth = torch.empty(ends[-1], width, dtype=torch.float64, device="cuda")
    for expert, matrix in enumerate(weight.double()):
        part = slice(ends[expert], ends[expert + 1])
        truth[part] = hidden[part].double() @ matrix.T
    check(out[pairs], truth)
