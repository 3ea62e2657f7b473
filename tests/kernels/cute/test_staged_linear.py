"""Products with staged weights in CuTe DSL: compiled for sm_90a anywhere, run on a GPU against float64."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Mxfp8Tensor, Nvfp4Tensor, ScaleLayout
from dist_infer.kernels.cute import staged_linear as op
from dist_infer.kernels.cute.staged_gemm import Variant
from dist_infer.kernels.quantize import dequantize
from dist_infer.kernels.reference.quantize import quantize
from dist_infer.kernels.staged_weight import stage_weight

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("is_nvfp4", "is_steep", "tokens"), [(True, False, 8), (True, False, 128), (False, True, 64), (False, False, 16)]
)
def test_variants_compile_without_a_gpu(is_nvfp4: bool, is_steep: bool, tokens: int, tmp_path: Path) -> None:
    """The matrix units take weights from registers, and ptxas lets the products of a buffer be waited for together."""
    variant = Variant(is_nvfp4=is_nvfp4, is_steep=is_steep, tokens=tokens, has_bias=tokens == 64)
    options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    ptx = op.compiled(variant, options).__ptx__  # type: ignore[attr-defined]
    assert ".target sm_90a" in ptx and "ld.local" not in ptx
    assert "cp.async.bulk.shared::cluster.global" in ptx and "cp.async.bulk.tensor.2d" in ptx
    product = rf"wgmma.mma_async.sync.aligned.m64n{tokens}k16\S+ \{{[^}}]*\}}, \{{"  # second operand: registers
    assert len(re.findall(product, ptx)) == variant.columns // 16
    last_products = re.findall(r"HGMMA\..*\bgsb0\b", sass_of(tmp_path))
    assert len(last_products) == 2 * 2  # of tiles, each in halves
    assert "stmatrix" in ptx and "st.global.v4.b32" in ptx  # results leave in 16 bytes of a row
    assert "div.rn.f32" not in ptx  # a call, before which ptxas would wait for every product by itself


def sass_of(folder: Path) -> str:
    triton = pytest.importorskip("triton", reason="triton, which brings a disassembler, is not installed")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (cubin,) = folder.glob("*.cubin")
    return subprocess.run([tool, "--dump-sass", cubin], check=True, capture_output=True, text=True).stdout


def weight_of(kind: str, rows: int, width: int) -> Nvfp4Tensor | Mxfp8Tensor:
    """Normal values; of a steep one, some rows are large."""
    generator = torch.Generator().manual_seed(rows + width)
    values = torch.randn(rows, width, generator=generator)
    if kind == "steep":
        values[::7] *= 2.0**40
    device = torch.device("cuda")
    weight: Nvfp4Tensor | Mxfp8Tensor
    if kind == "nvfp4":
        scale = (448 * 6 / values.abs().max()).view(1).to(device)
        weight = Nvfp4Tensor.empty(rows, width, ScaleLayout.LINEAR, device=device, global_scale=scale)
    else:
        weight = Mxfp8Tensor.empty(rows, width, ScaleLayout.LINEAR, device=device)
    quantize(values.to(device), weight)
    return weight


def check(out: Tensor, x: Tensor, weight: Nvfp4Tensor | Mxfp8Tensor, bias: Tensor | None) -> None:
    values = dequantize(weight, torch.float32).double()
    expected = x.double() @ values.t()
    sizes = x.double().abs() @ values.abs().t()
    if bias is not None:
        expected += bias.double()
    assert bool(((out.double() - expected).abs() <= expected.abs() * 2.0**-8 + sizes * 1e-6).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8", "steep"])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs"),
    [
        (5, 300, 4096),  # few blocks, each cut into many parts
        (1, 40, 160),  # one stage
        (64, 600, 1408),
        (24, 301, 640),  # rows of results off 16 bytes
        (20, 2304, 512),
        (16, 33024, 1024),  # whole blocks and cut ones
        (129, 1000, 1024),  # blocks of tokens
        (1000, 1536, 2048),
    ],
)
def test_however_blocks_are_cut(kind: str, tokens: int, outputs: int, inputs: int) -> None:
    """The same again, and in a graph on other inputs; no flag is left."""
    weight = weight_of(kind, outputs, inputs)
    staged = stage_weight(weight)
    generator = torch.Generator().manual_seed(tokens)
    x, other = (torch.randn(tokens, inputs, generator=generator).to(BF16).cuda() for _ in range(2))
    bias = torch.randn(outputs, generator=generator).to(BF16).cuda() if tokens % 2 else None
    out = op.staged_linear(x, staged, bias, BF16)
    check(out, x, weight, bias)
    expected = op.staged_linear(other, staged, bias, BF16)
    check(expected, other, weight, bias)
    graph = torch.cuda.CUDAGraph()
    buffer = x.clone()
    with torch.cuda.graph(graph):
        results = [op.staged_linear(buffer, staged, bias, BF16) for _ in range(3)]
    for inputs_of_replay, wanted in ((x, out), (other, expected), (x, out)):
        buffer.copy_(inputs_of_replay)
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(result, wanted) for result in results)
    assert not staged.flags.any()


def test_what_it_does_not_multiply_is_refused() -> None:
    values = torch.ones(16, 32)
    weight = Mxfp8Tensor.empty(16, 32, ScaleLayout.LINEAR, device=torch.device("cpu"))
    quantize(values, weight)
    staged = stage_weight(weight)
    narrow = Fp8Tensor.empty(16, 32, Fp8Scaling.ROWS, device=torch.device("cpu"))
    for x, other, dtype in ((narrow, staged, BF16), (values, weight, BF16), (values, staged, torch.float16)):
        with pytest.raises(TypeError, match="staged_linear takes"):
            op.staged_linear(x, other, None, dtype)
    assert op.staged_linear(values[:0].to(BF16), staged, None, BF16).shape == (0, 16)
