"""Norm and quantisation in one launch: the bytes of the two ops one after the other, on poisoned outputs."""

import math

import pytest
import torch
from torch import Tensor

from dist_infer.kernels import rms_norm as norm_op
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.reference.rms_norm import rms_norm as reference_rms_norm
from dist_infer.kernels.rms_norm_quant import LIBRARIES, RmsNormQuantFunction, rms_norm_quant
from dist_infer.kernels.triton import number_formats
from dist_infer.kernels.triton import rms_norm as triton_norm
from dist_infer.kernels.triton import rms_norm_quant as triton_norm_quant
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_devices
from tests.kernels.test_quantize import expected, poisoned, same_bytes, scale_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, of infinities

EPS = 1e-5
FORMATS = list(QuantFormat)
ROWS = (0, 1, 33)
NORMS = {library.name: library for library in norm_op.LIBRARIES}
EVERY_LIBRARY = pytest.mark.parametrize(("library", "device"), library_devices(LIBRARIES))
EVERY_FORMAT = pytest.mark.parametrize("quant_format", FORMATS, ids=lambda quant_format: quant_format.value)


def inputs(rows: int, hidden: int, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, residual; -0.0 pairs among them."""
    generator = torch.Generator().manual_seed(rows + hidden)
    x, residual = (torch.randn(rows, hidden, generator=generator) * 3 for _ in range(2))
    x[:, :5], residual[:, :5] = -0.0, -0.0
    weight = torch.rand(hidden, generator=generator) + 0.5
    return x.to(dtype).to(device), weight.to(dtype).to(device), residual.to(dtype).to(device)


def check(
    library: Library[RmsNormQuantFunction],
    quant_format: QuantFormat,
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    with_norm: bool,
) -> None:
    out = poisoned(quant_format, x)
    normed, total = library.function(x, weight, EPS, residual, out, with_norm)
    own_norm, own_total = norm_op.rms_norm(x, weight, EPS, residual, library=NORMS[library.name])
    assert torch.equal(total, own_total)
    assert (normed is None) is not with_norm
    if normed is not None:
        assert torch.equal(normed.view(torch.int16), own_norm.view(torch.int16))
    assert same_bytes(out, expected(quant_format, own_norm)), f"{list(x.shape)}"


@EVERY_LIBRARY
@EVERY_FORMAT
def test_bytes_of_norm_and_quantise_one_after_the_other(
    library: Library[RmsNormQuantFunction], device: str, quant_format: QuantFormat
) -> None:
    sizes = [(rows, 128) for rows in ROWS] + [(2, 384), (5, 384)]
    if device == "cuda":
        sizes += [(rows, 6144) for rows in (0, 1, 31, 32, 33, 127, 128, 129, 1000)]
        sizes += [(129, 2048), (33, 7168), (1500, 7168), (3, 16384)]
    for idx, (rows, hidden) in enumerate(sizes):
        x, weight, residual = inputs(rows, hidden, device)
        check(library, quant_format, x, weight, residual if idx % 3 else None, with_norm=idx % 2 == 0)


@EVERY_LIBRARY
@pytest.mark.parametrize("quant_format", [QuantFormat.FP8, QuantFormat.FP8_ROWS], ids=lambda chosen: chosen.value)
def test_fp8_of_any_width(library: Library[RmsNormQuantFunction], device: str, quant_format: QuantFormat) -> None:
    for hidden in (13, 24):
        x, weight, residual = inputs(3, hidden, device)
        check(library, quant_format, x, weight, residual, with_norm=True)


@EVERY_LIBRARY
def test_half_precision_and_rows_with_gaps(library: Library[RmsNormQuantFunction], device: str) -> None:
    x, weight, residual = inputs(5, 128, device, torch.float16)
    apart = torch.cat([x, x], 1)[:, :128]
    for quant_format in (QuantFormat.MXFP8, QuantFormat.NVFP4):
        check(library, quant_format, apart, weight, residual, with_norm=True)


@EVERY_LIBRARY
@EVERY_FORMAT
def test_nan_and_infinity_stay_in_their_rows(
    library: Library[RmsNormQuantFunction], device: str, quant_format: QuantFormat
) -> None:
    x, weight, residual = inputs(4, 128, device)
    x[1, 7], residual[2, 100] = math.nan, math.inf
    scale = scale_of(quant_format, device)
    normed, total, out = rms_norm_quant(x, weight, EPS, residual, quant_format, scale, with_norm=True, library=library)
    assert normed is not None and normed.isnan().any(1).tolist() == [False, True, True, False]
    assert total[2, 100].item() == math.inf
    assert same_bytes(out, expected(quant_format, normed))


@EVERY_LIBRARY
def test_the_quantiser_reads_the_rounded_norm(library: Library[RmsNormQuantFunction], device: str) -> None:
    """In float32 the norm lies above a tie of E4M3, rounded to bfloat16 on it: the tie's even neighbour is right."""
    x = torch.ones(1, 128, device=device).bfloat16()
    weight = x[0] * 1.0
    weight[0] = 1.0625  # the tie of 1 and 1.125
    x[0, 1] = 0.9921875
    normed, _, out = rms_norm_quant(
        x, weight, 0.0, None, QuantFormat.FP8, torch.ones(1, device=device), with_norm=True, library=library
    )
    assert normed is not None and normed[0, 0].item() == 1.0625
    wide = x.float() * torch.rsqrt(x.float().square().mean()) * weight.float()
    assert wide[0, 0].item() > 1.0625, "not rounded it would become 1.125"
    assert out.data[0, 0].item() == 1.0


@pytest.mark.parametrize(("library", "device"), library_devices(LIBRARIES[:1]))
def test_unwritten_padding_is_seen(
    library: Library[RmsNormQuantFunction], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the poison is for: a kernel that leaves the scales of invented rows alone."""
    monkeypatch.setattr(number_formats, "num_zeroing_programs", lambda rows, blocks, *, swizzled: 0)
    x, weight, residual = inputs(3, 128, device)
    out = poisoned(QuantFormat.MXFP8, x)
    library.function(x, weight, EPS, residual, out, False)
    normed, _ = reference_rms_norm(x, weight, EPS, residual)
    assert not same_bytes(out, expected(QuantFormat.MXFP8, normed))


def test_what_does_not_fit_is_refused() -> None:
    x, weight, _ = inputs(2, 96, "cpu")
    with pytest.raises(ValueError, match="needs a width that 128 divides"):
        rms_norm_quant(x, weight, EPS, None, QuantFormat.MXFP8, with_norm=True, library=LIBRARIES[-1])
    with pytest.raises(ValueError, match="does not fit weight"):
        rms_norm_quant(x, weight[1:], EPS, None, QuantFormat.MXFP8_LINEAR, with_norm=True, library=LIBRARIES[-1])


@pytest.mark.parametrize("quant_format", [QuantFormat.FP8_ROWS, QuantFormat.NVFP4], ids=lambda chosen: chosen.value)
def test_a_row_stays_in_the_registers_that_it_was_loaded_to(quant_format: QuantFormat) -> None:
    """Only sums of warps and the largest size of a row go through shared memory."""
    pointers = dict.fromkeys(("x", "residual", "weight", "normed", "total"), "*bf16")
    types = pointers | {"x_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32", "num_tokens": "i32"}
    is_fp8 = quant_format is QuantFormat.FP8_ROWS
    types |= {"data": "*fp8e4nv" if is_fp8 else "*u8", "scales": "*fp32" if is_fp8 else "*u8"}
    tile, num_warps = triton_norm.tile_of(6144)
    constants: dict[str, object] = {"HIDDEN": 6144, "TILE": tile, "NUM_WARPS": num_warps}
    constants |= {"FORMAT": quant_format.value, "scale": None, "OVERLAP": True}
    made = compile_ahead(triton_norm_quant.norm_and_quantize, types, constants, num_warps=num_warps // 2)
    assert made.shared_bytes <= 4 * num_warps
    assert "LDG.E.128" in made.asm["sass"] and made.spilled_bytes == 0
