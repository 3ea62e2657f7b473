"""Quantisation byte by byte: reference against ml_dtypes, Triton against the reference, on poisoned outputs."""

import itertools
import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.quantize import LIBRARIES, QuantFormat, QuantizeFunction, dequantize, quantize
from dist_infer.kernels.reference import quantize as reference
from dist_infer.kernels.triton import number_formats
from dist_infer.kernels.triton import quantize as triton_quantize
from tests.devices import DEVICES
from tests.kernels import device_code
from tests.kernels.aot import compile_ahead
from tests.kernels.triton_interpreter import TRITON_DEVICES

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, of infinities

BF16 = torch.bfloat16
FORMATS = list(QuantFormat)
ROWS = (0, 1, 31, 33, 128, 129)
FP8_SCALE, GLOBAL_SCALE = 0.37, 193.0
BY_NAME = {library.name: library for library in LIBRARIES}
Array = npt.NDArray[np.float64]


def scale_of(quant_format: QuantFormat, device: str) -> Tensor | None:
    value = {"fp8": FP8_SCALE, "nvfp4": GLOBAL_SCALE}.get(quant_format.value.removesuffix("_linear"))
    return None if value is None else torch.tensor([value], device=device)


def poisoned(quant_format: QuantFormat, x: Tensor) -> QuantizedTensor:
    out = quant_format.empty(*x.shape, device=x.device, scale=scale_of(quant_format, x.device.type))
    out.data.view(torch.uint8).fill_(0xFF)
    if quant_format is not QuantFormat.FP8:
        out.scales.view(torch.uint8).fill_(0xFF)
    return out


def expected(quant_format: QuantFormat, x: Tensor) -> QuantizedTensor:
    out = poisoned(quant_format, x)
    rcp = triton_quantize.hardware_reciprocal if x.is_cuda else reference.nearest_reciprocal
    reference.quantize(x, out, rcp)
    return out


def same_bytes(ours: QuantizedTensor, theirs: QuantizedTensor) -> bool:
    """NaN scales of FP8 blocks are equal whatever their bits."""
    if isinstance(ours, Fp8Tensor):
        scales = torch.equal(ours.scales.nan_to_num(-1, math.inf), theirs.scales.nan_to_num(-1, math.inf))
    else:
        scales = torch.equal(ours.scales, theirs.scales)
    return scales and torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))


def normal(rows: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    spread = torch.randint(-8, 8, (rows, 1), generator=generator)
    return (torch.randn(rows, width, generator=generator) * 2.0**spread).to(dtype)


def every_pattern() -> Tensor:
    """All 65,536 bfloat16 values among their neighbours, and others that fill the codes of a block."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    ramps = (torch.arange(8192) % 509 / 37 - 7).to(BF16)
    return torch.cat([patterns, ramps]).view(144, 512)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("quant_format", FORMATS, ids=lambda quant_format: quant_format.value)
def test_triton_gives_the_bytes_of_the_reference(device: str, quant_format: QuantFormat) -> None:
    cases = [normal(rows, 128) for rows in ROWS]
    cases += [normal(3, 128, torch.float16), normal(3, 128, torch.float32), torch.zeros(2, 128).to(BF16)]
    if device == "cuda":
        cases += [normal(rows, 6144) for rows in (*ROWS, 32, 127, 1000, 4096)] + [normal(129, 2048), normal(1000, 7168)]
    for x in cases:
        ours = poisoned(quant_format, x.to(device))
        triton_quantize.quantize(x.to(device), ours)
        assert same_bytes(ours, expected(quant_format, x.to(device))), f"{x.dtype} {list(x.shape)}"


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("quant_format", FORMATS, ids=lambda quant_format: quant_format.value)
def test_every_bfloat16_pattern_has_the_bytes_of_the_reference(device: str, quant_format: QuantFormat) -> None:
    x = every_pattern().to(device)
    ours = poisoned(quant_format, x)
    triton_quantize.quantize(x, ours)
    assert same_bytes(ours, expected(quant_format, x))


@pytest.mark.parametrize(
    ("quant_format", "width"),
    [
        (QuantFormat.NVFP4_LINEAR, 48),
        (QuantFormat.NVFP4, 192),
        (QuantFormat.MXFP8_LINEAR, 96),
        (QuantFormat.MXFP8, 384),
        (QuantFormat.FP8, 13),
        (QuantFormat.FP8_ROWS, 13),
    ],
)
@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_blocks_that_do_not_fill_a_program(device: str, quant_format: QuantFormat, width: int) -> None:
    x = normal(9, width).to(device)
    ours = poisoned(quant_format, x)
    triton_quantize.quantize(x, ours)
    assert same_bytes(ours, expected(quant_format, x))


def oracle_blocks(x: Tensor, block: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    blocks = x.float().numpy().reshape(x.shape[0], -1, block)
    return blocks, np.abs(blocks).max(-1)


def e4m3_bytes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    return np.clip(values, np.float32(-448), np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def finite_pattern_rows() -> Tensor:
    x = every_pattern()
    return torch.where(x.isfinite(), x, torch.zeros_like(x))


def test_mxfp8_reference_against_ml_dtypes() -> None:
    x = finite_pattern_rows()
    out = expected(QuantFormat.MXFP8_LINEAR, x)
    blocks, amax = oracle_blocks(x, 32)
    real = (amax * np.float32(1 / 448)).astype(np.float64)
    exponent = np.where(real == 0, -127, np.ceil(np.log2(np.where(real == 0, 1.0, real)))).clip(-127, 127)
    scales = np.ldexp(1.0, exponent.astype(int)).astype(ml_dtypes.float8_e8m0fnu)
    assert np.array_equal(scales.view(np.uint8), out.scales.numpy().reshape(amax.shape))
    usable = exponent > -127  # the rest has an infinite multiplier: another test
    values = blocks / scales.astype(np.float32)[..., None]
    data = out.data.view(torch.uint8).numpy().reshape(blocks.shape)
    assert np.array_equal(e4m3_bytes(values)[usable], data[usable])


def test_nvfp4_reference_against_ml_dtypes() -> None:
    x = finite_pattern_rows()
    out = expected(QuantFormat.NVFP4_LINEAR, x)
    blocks, amax = oracle_blocks(x, 16)
    scale = np.float32(GLOBAL_SCALE)
    with np.errstate(over="ignore", divide="ignore"):
        scales = e4m3_bytes(scale * (amax * np.float32(1 / 6)))
        stored = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        multiplier = np.where(stored == 0, np.float32(0), np.float32(1) / (stored * (np.float32(1) / scale)))
    assert np.array_equal(scales, out.scales.numpy().reshape(amax.shape))
    values = np.clip(blocks * multiplier[..., None], np.float32(-6), np.float32(6))
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape)
    assert np.array_equal(codes[:, 0::2] | codes[:, 1::2] << 4, out.data.numpy())


def test_fp8_reference_against_ml_dtypes() -> None:
    x = finite_pattern_rows()
    with np.errstate(over="ignore"):
        values = e4m3_bytes(x.float().numpy() * (np.float32(1) / np.float32(FP8_SCALE)))
    assert np.array_equal(values, expected(QuantFormat.FP8, x).data.view(torch.uint8))
    out = expected(QuantFormat.FP8_BLOCK128, x)
    blocks, amax = oracle_blocks(x, 128)
    scales = np.maximum(amax, np.float32(1e-10)) * np.float32(1 / 448)
    assert np.array_equal(scales, out.scales.numpy())
    values = e4m3_bytes(blocks * (np.float32(1) / scales)[..., None])
    assert np.array_equal(values.reshape(x.shape), out.data.view(torch.uint8).numpy())
    by_row = expected(QuantFormat.FP8_ROWS, x)
    row_scales = np.maximum(x.float().abs().amax(1).numpy(), np.float32(1e-10)) * np.float32(1 / 448)
    assert np.array_equal(row_scales, by_row.scales.view(-1).numpy())
    values = e4m3_bytes(x.float().numpy() * (np.float32(1) / row_scales)[:, None])
    assert np.array_equal(values, by_row.data.view(torch.uint8).numpy())


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_e2m1_rounds_ties_to_the_even_code(device: str) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    beside = [math.nextafter(tie, up) for tie in ties for up in (0.0, 9.0)]
    step = 2.0**-22
    values = torch.tensor([0.0, *ties, *(tie + sign * step for tie in ties for sign in (-1, 1)), *beside, 6.0])
    row = torch.cat([values, -values, torch.zeros(-2 * len(values) % 15)])
    # 6 in each block makes the scale 1 with G = 1, so that the codes are those of the values themselves
    x = torch.cat([torch.full((len(row) // 15, 1), 6.0), row.view(-1, 15)], 1).contiguous().to(device)
    out = QuantFormat.NVFP4_LINEAR.empty(*x.shape, device=x.device)
    triton_quantize.quantize(x, out)
    codes = x.cpu().numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(out.data.cpu().numpy(), codes[:, 0::2] | codes[:, 1::2] << 4)
    assert dequantize(out, torch.float32)[0, 1:9].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_nvfp4_scales_at_ties_are_those_that_codes_are_made_with(device: str) -> None:
    """G * (amax / 6) is rounded to a tie of E4M3 and lies above it if it isn't: one instruction for both is wrong."""
    amax = torch.tensor([1.0, 5.0, 13.0]) / 512
    x = (amax[:, None] * torch.arange(1, 17) / 16).to(BF16).to(device)
    ours, theirs = (
        QuantFormat.NVFP4_LINEAR.empty(3, 16, device=x.device, scale=torch.full((1,), 3.0, device=device))
        for _ in range(2)
    )
    triton_quantize.quantize(x, ours)
    reference.quantize(x, theirs, triton_quantize.hardware_reciprocal if x.is_cuda else reference.nearest_reciprocal)
    assert theirs.scales.view(-1).tolist() == [0, 2, 6]
    assert same_bytes(ours, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quant_format", [QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR])
def test_every_nvfp4_code_is_read(device: str, quant_format: QuantFormat) -> None:
    """All 256 scale bytes, each with all 16 codes."""
    scale_bytes = torch.arange(256, dtype=torch.uint8).view(64, 4)
    out = quant_format.empty(64, 64, device=torch.device(device), scale=torch.tensor([8.0], device=device))
    out.scales.copy_(reference.laid_out(scale_bytes, layout_of(out)))
    out.data.copy_((torch.arange(0, 16, 2) + torch.arange(1, 16, 2) * 16).to(torch.uint8).repeat(4))
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = scale_bytes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    truth = (values * scales[..., None] / 8).reshape(64, 64)
    assert np.array_equal(dequantize(out, torch.float32).cpu().numpy(), truth, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("quant_format", [QuantFormat.MXFP8, QuantFormat.MXFP8_LINEAR])
def test_every_mxfp8_code_is_read(device: str, quant_format: QuantFormat) -> None:
    """All scale bytes but NaN's, each with 32 of the 256 codes, turn about."""
    scale_bytes = torch.arange(256, dtype=torch.uint8).view(64, 4).clamp(max=254)
    out = quant_format.empty(64, 128, device=torch.device(device))
    out.scales.copy_(reference.laid_out(scale_bytes, layout_of(out)))
    codes = torch.arange(64 * 128, dtype=torch.int32).to(torch.uint8).view(64, 128)
    out.data.view(torch.uint8).copy_(codes)
    values = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(64, 4, 32)
    with np.errstate(over="ignore"):
        truth = values * scale_bytes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)[..., None]
    assert np.array_equal(dequantize(out, torch.float32).cpu().numpy(), truth.reshape(64, 128), equal_nan=True)


@pytest.mark.parametrize(
    ("quant_format", "steps"), [(QuantFormat.FP8_BLOCK128, 16), (QuantFormat.MXFP8, 16), (QuantFormat.NVFP4, 4)]
)
def test_reading_back_is_near(quant_format: QuantFormat, steps: int) -> None:
    x = normal(5, 256)
    scale = 448 * 6 / x.float().abs().max().view(1) if quant_format is QuantFormat.NVFP4 else None
    out = quantize(x, quant_format, scale, library=BY_NAME["torch"])
    amax = reference.blocks_of(x.float(), 16).abs().amax(-1).repeat_interleave(16, 1)
    largest = amax if quant_format is QuantFormat.NVFP4 else x.float().abs().amax(1, keepdim=True)
    assert bool(((dequantize(out, torch.float32) - x.float()).abs() <= largest / steps).all())


def test_fp8_weights_have_a_scale_a_tile() -> None:
    x = normal(200, 256, torch.float32)
    out = Fp8Tensor.empty(200, 256, Fp8Scaling.BLOCKS_128X128, device=x.device)
    BY_NAME["torch"].function(x, out)
    for down, across in itertools.product(range(2), range(2)):
        tile = x[down * 128 : (down + 1) * 128, across * 128 : (across + 1) * 128]
        assert out.scales[down, across] == tile.abs().max() * torch.tensor(1 / 448)
    assert bool(((dequantize(out, torch.float32) - x).abs() <= out.scales.max() * 16).all())


@pytest.mark.parametrize("library", ["torch", pytest.param("triton", marks=pytest.mark.gpu)])
def test_vanishing_blocks_of_mxfp8(library: str) -> None:
    """Zeros have byte 0 and stay; a block whose scale is 2^-127 saturates, and its zeros become NaN."""
    device = "cuda" if library == "triton" else "cpu"
    x = torch.zeros(3, 32, device=device).to(BF16)
    x[1, 3], x[1, 4] = 2.0**-126, -(2.0**-130)
    x[2, 3] = 2.0**-100
    out = quantize(x, QuantFormat.MXFP8_LINEAR, library=BY_NAME[library])
    data = out.data.view(torch.uint8).tolist()
    assert out.scales.tolist() == [0, 0, 127 - 108]
    assert data[0] == [0] * 32
    assert data[1][:6] == [0x7F, 0x7F, 0x7F, 0x7E, 0xFE, 0x7F]
    assert data[2][:4] == [0, 0, 0, 0x78]


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quant_format", FORMATS, ids=lambda quant_format: quant_format.value)
def test_nan_is_not_lost_and_never_leaves_its_block(device: str, quant_format: QuantFormat, value: float) -> None:
    x = normal(2, 256).to(device)
    x[1, 5] = value
    out = poisoned(quant_format, x)
    triton_quantize.quantize(x, out)
    read = dequantize(out, torch.float32).isnan().cpu()
    saturates = quant_format in (QuantFormat.FP8, QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR)
    assert bool(read.any()) is (math.isnan(value) or not saturates)
    assert not read[0].any() and (quant_format is QuantFormat.FP8_ROWS or not read[1, 128:].any())
    if not isinstance(out, Fp8Tensor | Nvfp4Tensor):
        assert 255 not in out.scales.tolist()


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("quant_format", [QuantFormat.MXFP8, QuantFormat.NVFP4])
def test_unwritten_padding_is_seen(device: str, quant_format: QuantFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the poison is for: a kernel that leaves the scales of invented rows alone."""
    monkeypatch.setattr(number_formats, "num_zeroing_programs", lambda rows, blocks, *, swizzled: 0)
    x = normal(33, 256).to(device)
    ours = poisoned(quant_format, x)
    triton_quantize.quantize(x, ours)
    assert not same_bytes(ours, expected(quant_format, x))
    assert bool((ours.scales == 0xFF).any())


def test_known_places_of_swizzled_scales() -> None:
    one = expected(QuantFormat.NVFP4, normal(129, 128))
    assert one.scales.numel() == 256 * 8
    scales = torch.arange(129 * 8, dtype=torch.int32).view(129, 8)
    buffer = reference.laid_out(scales, ScaleLayout.SWIZZLED_128X4)
    assert buffer[1024] == scales[128, 0] and buffer[1536] == scales[128, 4] and buffer[22] == scales[33, 2]
    assert torch.equal(reference.row_major(buffer, ScaleLayout.SWIZZLED_128X4, 129, 8), scales)


@pytest.mark.gpu
def test_the_hardware_divides_as_the_formats_take_it_to() -> None:
    """The constants are the instruction's, and so are the reciprocals of all powers of two."""
    rcp = triton_quantize.hardware_reciprocal
    constants = torch.tensor([448.0, 6.0], device="cuda")
    assert torch.equal(rcp(constants), (1.0 / constants.double()).float())
    powers = reference.ue8m0_values(torch.arange(255, device="cuda"))
    assert torch.equal(rcp(powers), reference.nearest_reciprocal(powers))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_carriers_of_every_format(device: str, library: Library[QuantizeFunction]) -> None:
    if library.name == "triton" and device == "cpu":
        pytest.skip("host: needs a GPU")
    x = normal(5, 128).to(device)
    kinds = {
        quant_format: type(quantize(x, quant_format, scale_of(quant_format, device), library=library))
        for quant_format in FORMATS
    }
    assert list(kinds.values()) == [Fp8Tensor, Fp8Tensor, Fp8Tensor, Nvfp4Tensor, Nvfp4Tensor, Mxfp8Tensor, Mxfp8Tensor]


@pytest.mark.parametrize(
    ("x", "quant_format", "scale", "message"),
    [
        (torch.zeros(2, 32), QuantFormat.NVFP4, None, "NVFP4 with swizzled 128x4 scales needs a width that 64 divides"),
        (torch.zeros(2, 24), QuantFormat.NVFP4_LINEAR, None, "NVFP4 with linear scales needs a width that 16 divides"),
        (torch.zeros(2, 96), QuantFormat.MXFP8, None, "MXFP8 with swizzled 128x4 scales needs a width that 128"),
        (torch.zeros(2, 16), QuantFormat.MXFP8_LINEAR, None, "MXFP8 with linear scales needs a width that 32 divides"),
        (torch.zeros(2, 64), QuantFormat.FP8_BLOCK128, None, "can't have the width 64: 128 must divide it"),
        (torch.zeros(2, 128), QuantFormat.FP8_BLOCK128, torch.ones(1), "fp8_block128 finds its scales"),
        (torch.zeros(2, 128), QuantFormat.FP8, None, "no scale is given"),
        (torch.zeros(2, 128), QuantFormat.NVFP4, torch.ones(2), "NVFP4 global scale must be one torch.float32"),
        (torch.zeros(2, 128).double(), QuantFormat.MXFP8, None, "torch.float64"),
        (torch.zeros(128, 2).t(), QuantFormat.MXFP8, None, "not contiguous"),
        (torch.zeros(128), QuantFormat.MXFP8, None, "no contiguous float matrix"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, quant_format: QuantFormat, scale: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(x, quant_format, scale, library=BY_NAME["torch"])


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("quant_format", [QuantFormat.NVFP4, QuantFormat.MXFP8])
@pytest.mark.parametrize(("rows", "width"), [(129, 640), (3, 1152)])
def test_tiles_for_many_rows(
    device: str, quant_format: QuantFormat, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_quantize, "TILES_FROM", 0)
    x = normal(rows, width).to(device)
    ours = poisoned(quant_format, x)
    triton_quantize.quantize(x, ours)
    assert same_bytes(ours, expected(quant_format, x))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    "quant_format", [kind for kind in FORMATS if kind is not QuantFormat.FP8_ROWS], ids=lambda kind: kind.value
)
def test_an_epilogue_that_owns_a_head_gives_the_bytes_of_a_quantiser(device: str, quant_format: QuantFormat) -> None:
    """Of what it has stored, not of what it added up; a scale a row would need all heads."""
    parts = torch.stack([normal(33, 512, torch.float32), normal(33, 512, torch.float32).flip(1)]).to(device)
    merged = torch.empty(33, 512, dtype=BF16, device=device)
    ours = poisoned(quant_format, merged)
    name, block, swizzled = triton_quantize.kernel_format(ours)
    num_zeroing = number_formats.num_zeroing_programs(33, 512 // block, swizzled=swizzled)
    scale = scale_of(quant_format, device)
    device_code.merge_heads[(33 + num_zeroing, 4)](
        parts, merged, ours.data, ours.scales, scale, 33, HEADS=4, HEAD_DIM=128, FORMAT=name, NUM_ZEROING=num_zeroing
    )
    assert torch.equal(merged, parts.sum(0).to(BF16))
    assert same_bytes(ours, expected(quant_format, merged))


@pytest.mark.parametrize(
    ("kernel", "name", "num_warps"),
    [
        ("quantize_blocks", "nvfp4_linear", 4),
        ("quantize_blocks", "fp8_block128", 4),
        ("quantize_tiles", "nvfp4", 2),
        ("quantize_tiles", "mxfp8", 8),
    ],
)
def test_compiles_for_hopper_with_wide_accesses(kernel: str, name: str, num_warps: int) -> None:
    data = "*u8" if name.startswith("nvfp4") else "*fp8e4nv"
    types = {"x": "*bf16", "data": data, "scales": "*fp32" if name == "fp8_block128" else "*u8", "num_rows": "i32"}
    constants = {"WIDTH": 6144, "FORMAT": name, "scale": None, "OVERLAP": True}
    if kernel == "quantize_tiles":
        constants["BLOCKS"] = triton_quantize.TILE_BLOCKS
    else:
        constants["NUM_BLOCKS"] = triton_quantize.ELEMENTS // (16 if data == "*u8" else 128)
    made = compile_ahead(getattr(triton_quantize, kernel), types, constants, num_warps=num_warps)
    assert "LDG.E.128" in made.asm["sass"] and made.spilled_bytes == 0
    assert ("STG.E.64" if data == "*u8" else "STG.E.128") in made.asm["sass"]


def layout_of(carrier: QuantizedTensor) -> ScaleLayout:
    assert not isinstance(carrier, Fp8Tensor)
    return carrier.layout
