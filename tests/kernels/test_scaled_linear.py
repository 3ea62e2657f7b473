"""Products with quantised weights: against float64, and byte by byte against a weight that is dequantised before."""

import re

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.packed_weight import pack_weight
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.reference.quantize import quantize as reference_quantize
from dist_infer.kernels.scaled_linear import LIBRARIES, ScaledLinearFunction, WeightFormat, scaled_linear
from dist_infer.kernels.triton import packed_blocks, packed_linear, packed_many
from dist_infer.kernels.triton import scaled_linear as triton_scaled_linear
from tests.devices import DEVICES
from tests.kernels import packed_assembly
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_devices
from tests.kernels.quantized_weights import quantized
from tests.kernels.triton_interpreter import TRITON_DEVICES

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, of unused lanes

packed_assembly.install()
BF16 = torch.bfloat16
NARROW = [WeightFormat.MXFP8, WeightFormat.NVFP4]
PREPARING = pytest.mark.parametrize(  # the libraries that prepare a weight
    ("name", "device"),
    [
        *(pytest.param("triton", *place.values, marks=place.marks) for place in TRITON_DEVICES),
        pytest.param("cute", "cuda", marks=pytest.mark.gpu),
    ],
)


def normal(rows: int, width: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    return torch.randn(rows, width, generator=generator).to(device)


def operands(
    weight_format: WeightFormat, num_tokens: int, num_outputs: int, width: int, device: str
) -> tuple[Tensor | Fp8Tensor, QuantizedTensor]:
    x = normal(num_tokens, width, device).to(BF16)
    weight = quantized(normal(num_outputs, width, device) * 0.3, weight_format)
    if weight_format in NARROW:
        return x, weight
    narrow = quantized(x, weight_format, is_input=True)
    assert isinstance(narrow, Fp8Tensor)
    return narrow, weight


def multiplied(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor, bias: Tensor | None, library: Library[ScaledLinearFunction]
) -> Tensor:
    prepared = weight if library.prepare is None else library.prepare(weight)
    return scaled_linear(x, prepared, bias, out_dtype=BF16, library=library)


def library_of(weight_format: WeightFormat, name: str) -> Library[ScaledLinearFunction]:
    return next(library for library in LIBRARIES[weight_format] if library.name == name)


def truth(x: Tensor | Fp8Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    product = values_of(x) @ dequantize(weight, torch.float32).double().t()
    return product if bias is None else product + bias.double()


def values_of(x: Tensor | Fp8Tensor) -> Tensor:
    return (dequantize(x, torch.float32) if isinstance(x, Fp8Tensor) else x).double()


def check(out: Tensor, x: Tensor | Fp8Tensor, weight: QuantizedTensor, bias: Tensor | None) -> None:
    """Half a unit of bfloat16 of each value, and the error of a long sum, relative to that of the sizes of its terms.

    The FP8 matrix units of sm_90 keep 14 bits of a partial sum.
    """
    expected = truth(x, weight, bias)
    assert out.shape == expected.shape and out.is_contiguous()
    sizes = values_of(x).abs() @ dequantize(weight, torch.float32).double().abs().t()
    sum_error = 2.0**-12 if isinstance(x, Fp8Tensor) and x.data.is_cuda else 1e-6
    error = (out.double() - expected).abs()
    assert bool((error <= expected.abs() * 2.0**-8 + sizes * sum_error).all()), error.max()


EVERY_CASE = pytest.mark.parametrize(
    ("weight_format", "library", "device"),
    [
        pytest.param(weight_format, *case.values, marks=case.marks, id=f"{weight_format.value}-{case.id}")
        for weight_format, libraries in LIBRARIES.items()
        for case in library_devices(libraries)
        if case.id not in ("scaled_mm-cpu", "cute-cpu")
    ],
)


@EVERY_CASE
def test_against_float64(weight_format: WeightFormat, library: Library[ScaledLinearFunction], device: str) -> None:
    sizes = [(0, 64, 128), (1, 64, 256), (17, 80, 384), (33, 144, 128)]
    if weight_format in NARROW:
        sizes.append((5, 40, 160))
    if device == "cuda":
        sizes += [(tokens, 1536, 2048) for tokens in (8, 64, 65, 128, 200)] + [(2, 256, 18432), (70, 576, 1024)]
    for idx, (num_tokens, num_outputs, width) in enumerate(sizes):
        x, weight = operands(weight_format, num_tokens, num_outputs, width, device)
        bias = normal(1, num_outputs, device)[0].to(BF16) if idx % 2 else None
        out = multiplied(x, weight, bias, library)
        assert out.dtype == BF16
        check(out, x, weight, bias)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_with_a_scale_a_row(device: str, bias: bool) -> None:
    library = LIBRARIES[WeightFormat.FP8][-1 if device == "cpu" else 0]
    for num_tokens, num_outputs, width in ((0, 64, 128), (1, 64, 256), (33, 144, 2048)):
        carriers = []
        for matrix in (normal(num_tokens, width, device), normal(num_outputs, width, device) * 0.3):
            rows = torch.linspace(0.1, 3, len(matrix), device=device)[:, None]
            carriers.append(Fp8Tensor.empty(len(matrix), width, Fp8Scaling.ROWS, device=matrix.device))
            reference_quantize(matrix * rows, carriers[-1])
        added = normal(1, num_outputs, device)[0].to(BF16) if bias else None
        out = scaled_linear(carriers[0], carriers[1], added, out_dtype=BF16, library=library)
        check(out, carriers[0], carriers[1], added)


@PREPARING
@pytest.mark.parametrize("weight_format", [*NARROW, WeightFormat.FP8_BLOCK])
@pytest.mark.parametrize("num_tokens", [64, pytest.param(128, marks=pytest.mark.gpu)])
def test_every_code_and_scale_of_a_weight(weight_format: WeightFormat, name: str, device: str, num_tokens: int) -> None:
    """Unit vectors read the weight out: all 256 bytes of data, and all scales that weights may have."""
    if (weight_format, name) == (WeightFormat.FP8_BLOCK, "cute"):
        pytest.skip("no library prepares these weights")
    weight = quantized(normal(128, 128, device), weight_format)
    codes = torch.arange(256, dtype=torch.uint8)
    if weight_format is not WeightFormat.NVFP4:
        codes = codes[(codes & 0x7F) != 0x7F]
    flat = codes.repeat(-(-weight.data.numel() // len(codes)))[: weight.data.numel()]
    weight.data.view(torch.uint8).copy_(flat.view(weight.data.shape).to(device))
    if isinstance(weight, Nvfp4Tensor):
        weight.scales.copy_(torch.arange(weight.scales.numel()) % 0x7F)
    elif isinstance(weight, Mxfp8Tensor):
        weight.scales.copy_(torch.arange(weight.scales.numel()) % 200 + 20)
    unit = torch.eye(128, device=device).to(BF16)
    results = []
    for rows in torch.split(unit, num_tokens):
        if weight_format is WeightFormat.FP8_BLOCK:
            results.append(triton_scaled_linear.block_linear(narrow(rows), weight, None, BF16))
        else:
            results.append(multiplied(rows, weight, None, library_of(weight_format, name)))
    values = truth(narrow(unit), weight, None) if weight_format is WeightFormat.FP8_BLOCK else truth(unit, weight, None)
    assert torch.equal(torch.cat(results).float(), values.to(BF16).float())


def narrow(x: Tensor) -> Fp8Tensor:
    quantised = quantized(x, WeightFormat.FP8_BLOCK, is_input=True)
    assert isinstance(quantised, Fp8Tensor)
    return quantised


@PREPARING
@pytest.mark.parametrize("weight_format", NARROW)
def test_rows_anywhere_in_memory(weight_format: WeightFormat, name: str, device: str) -> None:
    """Columns of a wider matrix, on and off 16 bytes, and NaN in other rows that must not get into these."""
    x, weight = operands(weight_format, 5, 96, 256, device)
    assert isinstance(x, Tensor)
    library = library_of(weight_format, name)
    expected = multiplied(x, weight, None, library)
    for offset in (0, 8, 3):
        wide = torch.full((6, 300), torch.nan, dtype=BF16, device=device)
        own = wide[:5, offset : offset + 256]
        own.copy_(x)
        assert torch.equal(multiplied(own, weight, None, library), expected)
    x[2, 7] = torch.nan
    mixed = multiplied(x, weight, None, library)
    assert bool(mixed[2].isnan().all())
    keep = [0, 1, 3, 4]
    assert torch.equal(mixed[keep], expected[keep])


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("weight_format", NARROW)
@pytest.mark.parametrize("shares", [1, 2, 8])
def test_every_way_to_share_a_product_out(weight_format: WeightFormat, shares: int, device: str) -> None:
    """Over 7 groups of rows and 11 or 22 tiles, which not all warps have as many of."""
    x, weight = operands(weight_format, 5, 112, 1408, device)
    assert isinstance(x, Tensor) and not isinstance(weight, Fp8Tensor)
    out = torch.full((5, 112), torch.nan, dtype=BF16, device=device)
    packed_linear.multiply_few(x, pack_weight(weight), None, out, shares)
    check(out, x, weight, None)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("weight_format", NARROW)
def test_rows_are_dequantised_for_many_tokens(weight_format: WeightFormat, device: str) -> None:
    """From row 32 on, as far as there are rows and columns; NVFP4 by the unit of its sums, without the global scale."""
    _, weight = operands(weight_format, 1, 72, 224, device)
    assert not isinstance(weight, Fp8Tensor)
    wide = torch.full((40, 224), torch.nan, dtype=BF16, device=device)
    packed_many.dequantize(pack_weight(weight), 32, wide)
    values = dequantize(weight, torch.float32)[32:]
    if isinstance(weight, Nvfp4Tensor) and weight.global_scale is not None:
        values = values * weight.global_scale * 2.0**-9
    torch.testing.assert_close(wide.float(), values, rtol=2.0**-20, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("weight_format", "name", "num_tokens", "num_alone"),
    [
        (WeightFormat.FP8_BLOCK, "triton", 40, 3),
        *((weight_format, "triton", *numbers) for weight_format in NARROW for numbers in ((7, 1), (40, 9))),
        *((weight_format, "cute", *numbers) for weight_format in NARROW for numbers in ((7, 1), (128, 1))),
    ],
)
def test_company_does_not_change_a_token(
    weight_format: WeightFormat, name: str, num_tokens: int, num_alone: int
) -> None:
    """The order of a token's sums depends on the weight alone, within each kernel written here."""
    x, weight = operands(weight_format, num_tokens, 1536, 7168, "cuda")
    library = library_of(weight_format, name)
    together = multiplied(x, weight, None, library)
    first: Tensor | Fp8Tensor
    if isinstance(x, Fp8Tensor):
        own = x.data[:num_alone], x.scales[:num_alone]
        first = Fp8Tensor(data=own[0], scales=own[1], scaling=x.scaling, shape=(num_alone, 7168))
    else:
        first = x[:num_alone]
    assert torch.equal(multiplied(first, weight, None, library), together[:num_alone])


@pytest.mark.parametrize("device", DEVICES)
def test_the_reference_takes_wider_outputs(device: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x, weight = normal(3, 64, device).to(dtype), quantized(normal(8, 64, device), WeightFormat.NVFP4)
        out = scaled_linear(x, weight, out_dtype=dtype, library=LIBRARIES[WeightFormat.NVFP4][-1])
        torch.testing.assert_close(out.double(), truth(x, weight, None), rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    reference = LIBRARIES[WeightFormat.FP8][-1]
    x, weight = operands(WeightFormat.FP8, 2, 32, 128, "cpu")
    _, by_blocks = operands(WeightFormat.FP8_BLOCK, 2, 32, 128, "cpu")
    plain, nvfp4 = operands(WeightFormat.NVFP4, 2, 32, 128, "cpu")
    swizzled = Nvfp4Tensor.empty(32, 128, ScaleLayout.SWIZZLED_128X4, device=torch.device("cpu"))
    assert isinstance(plain, Tensor)
    for operand, other, bias, message in (
        (plain[:, 1:], nvfp4, None, r"x \[2, 127\] does not fit weight \[32, 128\]"),
        (plain, weight, None, "don't fit: none, tensor"),
        (x, by_blocks, None, "don't fit: tensor, 128x128"),
        (x, nvfp4, None, "Nvfp4Tensor as weight takes an x of torch.bfloat16, not FP8"),
        (plain.float(), nvfp4, None, "takes an x of torch.bfloat16, not torch.float32"),
        (plain, swizzled, None, "the scales of a weight are linear, not swizzled"),
        (x, weight, torch.zeros(31).to(BF16), "bias torch.bfloat16"),
        (x, weight, torch.zeros(32), "bias torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            scaled_linear(operand, other, bias, out_dtype=BF16, library=reference)


def test_where_the_libraries_run() -> None:
    cpu, gpu = (Target(device=torch.device(kind), dtype=BF16) for kind in ("cpu", "cuda"))
    odd = Target(device=torch.device("cuda"), dtype=BF16, geometry={"inputs": 128, "outputs": 24})
    wide = Target(device=torch.device("cuda"), dtype=torch.float32)
    product, reference = LIBRARIES[WeightFormat.FP8]
    assert product.is_available(gpu) is None and reference.is_available(cpu) is None
    assert product.is_available(odd) == "needs sizes that 16 divides, not 24"
    assert product.is_available(wide) == "gives bfloat16, not torch.float32"
    for libraries in LIBRARIES.values():
        assert all("needs a GPU" in str(library.is_available(cpu)) for library in libraries[:-1])
        assert "not torch.float32" in str(libraries[0].is_available(wide))


def longest_loop(sass: str) -> list[str]:
    """The instructions between a branch that goes back the farthest and its target."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]+);", sass)]
    loops = []
    for at, text in code:
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            loops.append([other for place, other in code if int(target[1], 16) <= place <= at])
    return max(loops, key=len)


@pytest.mark.parametrize(("name", "columns", "instructions"), [("nvfp4", 128, 3.5), ("mxfp8", 64, 4.5)])
def test_few_tokens_go_through_registers_alone(name: str, columns: int, instructions: float) -> None:
    """No shared memory and no waiting in the loop, weights by 16 bytes; at most so many instructions a weight."""
    types = dict.fromkeys(("x", "data", "scales"), "*i32") | {"out": "*bf16"}
    types |= dict.fromkeys(("num_tokens", "num_groups", "num_tiles"), "i32")
    types |= {"num_outputs": "i32:16", "x_stride": "i32:16"}
    constants = {"FORMAT": name, "GROUPS": 1, "SHARES": 4, "OVERLAP": True, "bias": None, "global_scale": None}
    made = compile_ahead(packed_linear.multiply_packed, types, constants, num_warps=4)
    body = longest_loop(made.asm["sass"])
    assert not any(re.match(r"(@!?P\d )?(STS|LDS|LDSM|BAR|SHFL)", line) for line in body)
    assert sum("LDG.E.128" in line for line in body) >= 4 and made.spilled_bytes == 0
    assert len(body) * 32 / (16 * columns) < instructions
    assert made.num_registers <= 56  # so that a multiprocessor holds 36 warps


@pytest.mark.parametrize(("name", "scales"), [("nvfp4", "*u8"), ("mxfp8", "*i32")])
def test_some_tokens_go_to_warpgroups_from_registers(name: str, scales: str) -> None:
    """All that is read comes by itself, ahead of its use, and only inputs are stored in another order."""
    types = {"x": "*bf16", "data": "*i16", "scales": scales, "out": "*fp32"}
    types |= dict.fromkeys(("num_outputs", "x_stride"), "i32:16")
    types |= dict.fromkeys(("num_tokens", "num_groups", "num_tiles", "steps_per_split"), "i32")
    constants = {"IS_SPLIT": True, "FORMAT": name, "TILE_N": 64, "TILE_T": 16, "num_stages": 4, "OVERLAP": True}
    made = compile_ahead(
        packed_blocks.multiply_blocks, types, constants | {"bias": None, "global_scale": None}, num_warps=4
    )
    body = longest_loop(made.asm["sass"])
    assert any(line.startswith("HGMMA") for line in body) and made.spilled_bytes == 0
    assert not any(re.match(r"(@!?P\d )?LDG\.", line) for line in body)
    assert sum(line.startswith("STS") for line in body) <= 8
    assert len(body) * 128 / (64 * 128) < 5


def test_fp8_blocks_use_the_fp8_matrix_units_of_hopper() -> None:
    types = dict.fromkeys(("x", "weight"), "*fp8e4nv") | dict.fromkeys(("x_scales", "weight_scales"), "*fp32")
    types |= {"out": "*bf16", "num_tokens": "i32", "num_outputs": "i32:16"}
    constants = {"K": 7168, "TILE_N": 64, "TILE_T": 16, "GROUP": 16, "num_stages": 4, "bias": None}
    made = compile_ahead(triton_scaled_linear.multiply_fp8_blocks, types, constants, num_warps=4)
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in made.asm["ptx"] and made.spilled_bytes == 0
