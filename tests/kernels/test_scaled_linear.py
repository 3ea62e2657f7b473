"""Products with quantised weights: against float64, and byte by byte against a weight that is dequantised before."""

import re

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, QuantizedTensor, ScaleLayout
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.reference.quantize import quantize as reference_quantize
from dist_infer.kernels.scaled_linear import LIBRARIES, ScaledLinearFunction, WeightFormat, scaled_linear
from dist_infer.kernels.triton import scaled_linear as triton_scaled_linear
from tests.devices import DEVICES
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_devices
from tests.kernels.triton_interpreter import TRITON_DEVICES

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, of unused lanes

BF16 = torch.bfloat16
NARROW = [WeightFormat.MXFP8, WeightFormat.NVFP4]


def normal(rows: int, width: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    return torch.randn(rows, width, generator=generator).to(device)


def quantized(x: Tensor, weight_format: WeightFormat, *, is_input: bool = False) -> QuantizedTensor:
    out: QuantizedTensor
    rows, width = x.shape
    if weight_format is WeightFormat.FP8:
        scale = (x.float().abs().max() / 448).view(1) if x.numel() else torch.ones(1, device=x.device)
        out = Fp8Tensor.empty(rows, width, Fp8Scaling.TENSOR, device=x.device, scale=scale)
    elif weight_format is WeightFormat.FP8_BLOCK:
        scaling = Fp8Scaling.BLOCKS_1X128 if is_input else Fp8Scaling.BLOCKS_128X128
        out = Fp8Tensor.empty(rows, width, scaling, device=x.device)
    elif weight_format is WeightFormat.MXFP8:
        out = Mxfp8Tensor.empty(rows, width, ScaleLayout.LINEAR, device=x.device)
    else:
        scale = (448 * 6 / x.float().abs().max()).view(1)
        out = Nvfp4Tensor.empty(rows, width, ScaleLayout.LINEAR, device=x.device, global_scale=scale)
    reference_quantize(x, out)
    return out


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
        if case.id != "scaled_mm-cpu"
    ],
)


@EVERY_CASE
def test_against_float64(weight_format: WeightFormat, library: Library[ScaledLinearFunction], device: str) -> None:
    sizes = [(0, 64, 128), (1, 64, 256), (17, 80, 384), (33, 144, 128)]
    if device == "cuda":
        sizes += [(tokens, 1536, 2048) for tokens in (1, 8, 63, 64, 65, 200)] + [(5, 7168, 4096), (129, 576, 7168)]
    for idx, (num_tokens, num_outputs, width) in enumerate(sizes):
        x, weight = operands(weight_format, num_tokens, num_outputs, width, device)
        bias = normal(1, num_outputs, device)[0].to(BF16) if idx % 2 else None
        out = scaled_linear(x, weight, bias, out_dtype=BF16, library=library)
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


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("weight_format", [*NARROW, WeightFormat.FP8_BLOCK])
def test_every_code_and_scale_of_a_weight(device: str, weight_format: WeightFormat) -> None:
    """Unit vectors read the weight out: all 256 bytes of data, and all scales that weights may have."""
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
    x: Tensor | Fp8Tensor = unit
    function = triton_scaled_linear.dequantized_linear
    if weight_format is WeightFormat.FP8_BLOCK:
        narrow = quantized(unit, weight_format, is_input=True)
        assert isinstance(narrow, Fp8Tensor)
        x, function = narrow, triton_scaled_linear.block_linear
    out = function(x, weight, None, BF16)
    expected = truth(x, weight, None).float() if isinstance(x, Fp8Tensor) else dequantize(weight, torch.float32).t()
    assert torch.equal(out.float(), expected.to(BF16).float())


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", list(WeightFormat))
def test_company_does_not_change_a_token(weight_format: WeightFormat) -> None:
    """The order of a token's sums depends on the weight's shape alone, within the kernels written here."""
    if weight_format is WeightFormat.FP8:
        pytest.skip("gpu: cuBLAS chooses by the number of tokens")
    x, weight = operands(weight_format, 40, 1536, 7168, "cuda")
    library = LIBRARIES[weight_format][0]
    together = scaled_linear(x, weight, None, out_dtype=BF16, library=library)
    alone, _ = operands(weight_format, 40, 1536, 7168, "cuda")
    first: Tensor | Fp8Tensor
    if isinstance(alone, Fp8Tensor):
        first = Fp8Tensor(data=alone.data[:3], scales=alone.scales[:3], scaling=alone.scaling, shape=(3, 7168))
    else:
        first = alone[:3]
    assert torch.equal(scaled_linear(first, weight, None, out_dtype=BF16, library=library), together[:3])


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
        assert "needs a GPU" in str(libraries[0].is_available(cpu))
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


@pytest.mark.parametrize(("name", "instructions"), [("nvfp4", 4.5), ("mxfp8", 5.0)])
def test_dequantises_on_the_way_to_the_matrix_units_of_hopper(name: str, instructions: float) -> None:
    """In registers: the codes come by 16 bytes, and nothing but them is read back from shared memory."""
    types = {
        "x": "*bf16",
        "data": "*i16",
        "scales": "*u8",
        "out": "*fp32",
        "num_tokens": "i32",
        "tiles_per_split": "i32",
    }
    types |= {"num_outputs": "i32:16", "x_stride": "i32:16"}
    constants = {"K": 7168, "IS_SPLIT": True, "FORMAT": name, "TILE_N": 64, "TILE_T": 16, "TILE_K": 128}
    constants |= {"num_stages": 4, "bias": None, "global_scale": None, "OVERLAP": True}
    made = compile_ahead(triton_scaled_linear.multiply_dequantized, types, constants, num_warps=4)
    assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.cg.shared.global" in made.asm["ptx"]
    assert made.spilled_bytes == 0
    body = longest_loop(made.asm["sass"])
    assert len(body) * 128 / (64 * 128) < instructions
    assert sum(line.startswith("STS") for line in body) <= 8  # of x


def test_fp8_blocks_use_the_fp8_matrix_units_of_hopper() -> None:
    types = dict.fromkeys(("x", "weight"), "*fp8e4nv") | dict.fromkeys(("x_scales", "weight_scales"), "*fp32")
    types |= {"out": "*bf16", "num_tokens": "i32", "num_outputs": "i32:16"}
    constants = {"K": 7168, "TILE_N": 64, "TILE_T": 16, "GROUP": 16, "num_stages": 4, "bias": None}
    made = compile_ahead(triton_scaled_linear.multiply_fp8_blocks, types, constants, num_warps=4)
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in made.asm["ptx"] and made.spilled_bytes == 0
