"""Grouped products in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute import grouped_gemm as op
from dist_infer.kernels.cute.grouped_gemm_parts import Variant
from dist_infer.kernels.cute.moe_align import align
from dist_infer.kernels.cute.moe_forms import FORMS, Form, form_for
from dist_infer.kernels.reference.silu_mul import silu_mul
from tests.kernels.cute.ragged_pairs import COUNTS, TOP_K, normal, ragged

WIDE = Form((16, 40, 48), 4, 128, 1)
DEEP = Form((8, 16), 6, 64, 2)
SHALLOW = Form((8, 24, 32), 8, 64, 1)
SORTED = Form((16, 40, 64), 4, 128, 1)  # long tiles, which are sorted
JOINT = Form((16, 40, 64), 4, 128, 1, cluster=2)
NAMED = {"wide": WIDE, "deep": DEEP, "shallow": SHALLOW, "sorted": SORTED, "joint": JOINT}
SEVERAL = [pytest.param(form, id=name) for name, form in NAMED.items()]


def variant(activation: GatedActivation | None, form: Form = WIDE, *, orders: bool = False) -> Variant:
    return Variant(activation=activation, dtype=torch.bfloat16, orders=orders, **form._asdict())


@pytest.mark.parametrize(
    ("activation", "form"),
    [
        (GatedActivation.SILU, WIDE),
        (GatedActivation.SWIGLUOAI, DEEP),
        (GatedActivation.SILU, SHALLOW),
        (GatedActivation.SILU, JOINT),
        (GatedActivation.SILU, DEEP),
        (None, DEEP),
        (None, JOINT),
    ],
)
def test_variants_compile_without_a_gpu(activation: GatedActivation | None, form: Form, tmp_path: Path) -> None:
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}"
    ptx = op.compiled(variant(activation, form, orders=form is DEEP), options).__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx
    for size in form.sizes:
        assert f"wgmma.mma_async.sync.aligned.m64n{size}k16" in ptx
    assert "cp.async.bulk.tensor.2d" in ptx
    assert (".multicast::cluster" in ptx) == (form.cluster > 1)
    assert ("cp.async.cg.shared.global" in ptx) == (activation is not None)  # rows are gathered by 16 bytes
    assert ("match.any.sync" in ptx) == (form is DEEP)
    assert "stmatrix" in ptx and "st.global.v4.b32" in ptx
    assert "ld.local" not in ptx


def test_the_form_follows_from_pairs_an_expert() -> None:
    assert form_for(128, 128, 2048, 768) is FORMS[0][1]
    assert form_for(18 * 64 + 1, 64, 2048, 768) is FORMS[2][1]
    assert form_for(128, 128, 2048, 768, 3) is FORMS[3][1]
    assert form_for(1 << 15, 128, 2048, 768).cluster == 2
    assert form_for(1 << 15, 128, 2048, 1408).cluster == 1  # 11 blocks
    odd = form_for(128, 128, 192, 768)
    assert (odd.pieces, odd.num_stages) == (1, 12)
    for _, form in FORMS:
        made = variant(None, form)
        stage = made.stage_bytes + made.pairs * form.pieces * 128
        assert form.num_stages * stage < 227 * 1024


def test_what_no_variant_takes_is_refused() -> None:
    order, firsts = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    rows, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(2, 128, 64, dtype=torch.bfloat16)
    wide = torch.zeros(4, 96, dtype=torch.bfloat16), torch.zeros(2, 128, 96, dtype=torch.bfloat16)
    ids = torch.zeros(513, dtype=torch.int32)
    with pytest.raises(ValueError, match="gate_up: 513 pairs are not in order, 512 in short tiles can be"):
        op.gate_up(rows, weight, ids, ids, TOP_K, variant(GatedActivation.SILU, SHALLOW, orders=True))
    many = rows, torch.zeros(257, 128, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="gate_up: rows"):  # 64 channels are not a stage of two pieces
        op.gate_up(rows, weight, order, firsts, TOP_K, variant(GatedActivation.SILU, DEEP))
    for wrong in ((rows.half(), weight), (rows, weight[:, :96]), wide, many):
        with pytest.raises(ValueError, match="down: rows"):
            op.down(*wrong, order, firsts, variant(None))
        with pytest.raises(ValueError, match="gate_up: rows"):
            op.gate_up(*wrong, order, firsts, TOP_K, variant(GatedActivation.SILU))


def check(out: Tensor, truth: Tensor) -> None:
    """Sums of fewer than 2^11 products in float32, rounded once."""
    assert (out.double() - truth).abs().max() <= 2**-8 * truth.abs().max()
    wrong = (out != truth.bfloat16()).double().mean()
    assert wrong < 0.02, f"{wrong:.1%} of the values are not the truth rounded once"


@pytest.mark.gpu
@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize("activation", list(GatedActivation))
@pytest.mark.parametrize(("counts", "num_dead"), COUNTS)
def test_gate_up_against_float64(counts: list[int], num_dead: int, activation: GatedActivation, form: Form) -> None:
    order, firsts = ragged(counts, num_dead)
    inner, width = 320, 320 if form.pieces == 1 else 384  # blocks of channels for CTAs in twos and one more
    x, weight = normal(len(order) // TOP_K, width) * width**0.5 * 4, normal(len(counts), 2 * inner, width)
    out = op.gate_up(x, weight, order, firsts, TOP_K, variant(activation, form))
    ends = firsts.tolist()
    rows = x[(order[: ends[-1]] // TOP_K).long()].double()
    truth = torch.empty(ends[-1], inner, dtype=torch.float64, device="cuda")
    for expert, matrix in enumerate(weight.double()):
        part = slice(ends[expert], ends[expert + 1])
        truth[part] = silu_mul(rows[part] @ matrix.T, activation)
    check(out[: ends[-1]], truth)


@pytest.mark.gpu
@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize(("counts", "num_dead"), COUNTS)
def test_down_against_float64(counts: list[int], num_dead: int, form: Form) -> None:
    order, firsts = ragged(counts, num_dead)
    inner, width = 192, 576
    hidden, weight = normal(len(order), inner) * inner**0.5, normal(len(counts), width, inner)
    ends = firsts.tolist()
    hidden[ends[-1] :] = float("nan")
    out = op.down(hidden, weight, order, firsts, variant(None, form))
    pairs = order[: ends[-1]].long()
    truth = torch.empty(ends[-1], width, dtype=torch.float64, device="cuda")
    for expert, matrix in enumerate(weight.double()):
        part = slice(ends[expert], ends[expert + 1])
        truth[part] = hidden[part].double() @ matrix.T
    check(out[pairs], truth)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 20, 170])
@pytest.mark.parametrize("num_experts", [3, 64, 256])
def test_few_pairs_are_put_in_order_on_the_way(num_rows: int, num_experts: int) -> None:
    """The same bytes as with the order of a launch before."""
    inner, width = 192, 384
    generator = torch.Generator().manual_seed(num_rows + num_experts)
    ids = torch.randint(-1, num_experts + 1, (num_rows * TOP_K,), generator=generator).int().cuda()
    x, weight = normal(num_rows, width), normal(num_experts, 2 * inner, width)
    order, firsts = align(ids.view(num_rows, TOP_K), num_experts)
    gate = [variant(GatedActivation.SILU, DEEP, orders=orders) for orders in (False, True)]
    expected = op.gate_up(x, weight, order, firsts, TOP_K, gate[0])
    hidden = op.gate_up(x, weight, ids, ids, TOP_K, gate[1])
    total = int(firsts[-1])
    assert torch.equal(hidden[:total], expected[:total])
    back = normal(num_experts, width, inner)
    outputs = op.down(expected, back, ids, ids, variant(None, DEEP, orders=True))
    held = (ids >= 0) & (ids < num_experts)
    assert torch.equal(outputs[held], op.down(expected, back, order, firsts, variant(None, DEEP))[held])
