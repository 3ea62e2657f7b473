"""The dense matrix product."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, Target
from dist_infer.kernels.linear import LIBRARIES, LinearFunction, linear
from dist_infer.kernels.triton.linear import _row_product, _tile_product, few_rows
from tests.devices import DEVICES
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases
from tests.kernels.triton_interpreter import TRITON_DEVICES
from tests.yardstick import check_error, check_rounded_once


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"), [(0, 63, 5), (1, 129, 63), (63, 1, 129), (129, 63, 1), (4, 7, 0)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_the_formula(
    device: str,
    library: Library[LinearFunction],
    dtype: torch.dtype,
    num_tokens: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).to(device)
        for shape in ((num_tokens, inputs), (outputs, inputs), (outputs,))
    )
    truth = x.double() @ weight.double().T
    yardstick = x @ weight.T
    if with_bias:
        truth, yardstick = truth + bias.double(), yardstick + bias
    out = linear(x, weight, bias if with_bias else None, library=library)
    assert out.is_contiguous()
    check_error(out, truth, yardstick)


ONEDNN = next(library for library in LIBRARIES if library.name == "onednn")


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product with its terms added in their order in float32, as oneDNN adds those of one row; rounded once."""
    total = torch.zeros(len(x), len(weight))
    for column, factors in zip(x.float().T, weight.float().T, strict=True):
        total += column[:, None] * factors
    return (total if bias is None else total + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(63, 97), (1, 5), (130, 1)])
def test_onednn_on_packed_and_other_weights(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Rows of wider matrices and none at all."""
    if ONEDNN.is_available(Target(device=torch.device("cpu"), dtype=dtype)) is not None:
        pytest.skip("host: oneDNN can't multiply in this dtype on this processor")
    assert ONEDNN.prepare is not None
    generator = torch.Generator().manual_seed(inputs)
    weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((outputs, inputs), (outputs,)))
    packed = ONEDNN.prepare(weight)
    for num_rows in (0, 1, 17):
        x = torch.randn(num_rows, inputs + 8, generator=generator).to(dtype)[:, 5 : 5 + inputs]
        for added in (None, bias):
            truth = x.double() @ weight.double().T + (0 if added is None else added.double())
            yardstick = one_by_one(x, weight, added)
            for operand in (packed, weight):
                out = linear(x, operand, added, library=ONEDNN)
                assert out.is_contiguous()
                check_error(out, truth, yardstick, factor=2.0 if dtype == torch.float32 else 1.0)


@pytest.mark.parametrize(
    ("device", "dtype", "geometry", "reason"),
    [
        ("cuda", torch.float32, {}, "needs a CPU, not cuda"),
        ("cpu", torch.float64, {}, "takes float32 and bfloat16, not float64"),
        ("cpu", torch.float16, {}, "takes float32 and bfloat16, not float16"),
        ("cpu", torch.float32, {"inputs": 0, "outputs": 4}, "the weight is empty"),
        ("cpu", torch.float32, {"inputs": 4, "outputs": 4}, None),
    ],
)
def test_what_onednn_takes(device: str, dtype: torch.dtype, geometry: dict[str, int], reason: str | None) -> None:
    if ONEDNN.is_available(Target(device=torch.device("cpu"), dtype=torch.float32)) is not None:
        pytest.skip("no oneDNN here")
    assert ONEDNN.is_available(Target(device=torch.device(device), dtype=dtype, geometry=geometry)) == reason


@pytest.mark.parametrize("device", DEVICES)
def test_without_inputs_only_the_bias_is_left(device: str) -> None:
    """A rank whose shard of the inputs is empty still takes part in the sum."""
    x, weight, bias = torch.ones(3, 0, device=device), torch.ones(2, 0, device=device), torch.tensor([1.0, 2.0])
    assert linear(x, weight, library=LIBRARIES[-1]).tolist() == [[0.0, 0.0]] * 3
    assert linear(x, weight, bias.to(device), library=LIBRARIES[-1]).tolist() == [[1.0, 2.0]] * 3


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 70), (528, 9), (16, 3)])
def test_few_rows(device: str, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Rows of wider matrices; inputs that fill their blocks and others, up to sixteen rows."""
    generator = torch.Generator().manual_seed(outputs)
    x = torch.randn(16, inputs + 48, generator=generator).to(dtype).to(device)[:, 16 : 16 + inputs]
    weight = torch.randn(outputs, inputs + 16, generator=generator).to(dtype).to(device)[:, :inputs]
    bias = torch.randn(outputs, generator=generator).to(dtype).to(device)
    for num_rows in (1, 2, 16):
        rows = x[:num_rows]
        out = few_rows(rows, weight, bias)
        truth = rows.double() @ weight.double().T + bias.double()
        check_error(out, truth, torch.nn.functional.linear(rows, weight, bias))
        check_rounded_once(out, truth)
        assert torch.equal(few_rows(rows, weight, None), few_rows(rows, weight, torch.zeros_like(bias)))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    x, weight = (torch.randn(rows, 512, device=device).bfloat16() for rows in (16, 40))
    together = few_rows(x, weight, None)
    assert torch.equal(few_rows(x[3:5], weight, None), together[3:5])
    x[0] = torch.nan
    assert torch.equal(few_rows(x, weight, None)[1:], together[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 7, 17])
def test_a_captured_graph_gives_the_bytes_of_eager_calls(num_rows: int) -> None:
    """Where kernels overlap: each waits for the one before it."""
    weights = [torch.randn(2048, 2048, device="cuda").bfloat16() / 45 for _ in range(20)]
    x = torch.randn(num_rows, 2048, device="cuda").bfloat16()

    def chain() -> Tensor:
        y = x
        for weight in weights:
            y = linear(y, weight, library=LIBRARIES[0])
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(10):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("gated", [False, True])
def test_ahead_of_time_one_row_loads_weights_before_it_waits(gated: bool) -> None:
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "num_outputs": "i32:16", "weight_stride": "i32:16"}
    types["is_early"] = "i32"
    activation = "silu" if gated else None
    constexprs = {"bias": None, "added": None, "K": 4096, "ACTIVATION": activation}
    constexprs |= {"STRIP": 2, "BLOCK_K": 1024, "OVERLAP": True}
    made = compile_ahead(_row_product, types, constexprs, num_warps=2, launch_pdl=True)
    unless_early, before, after = made.asm["sass"].split("ACQBULK")
    assert "LDG" not in unless_early and before.count("LDG.E.EF.128") == 4
    assert "LDG.E.EF.128" in after and "LDG.E.128" in after
    assert "ld.global.b" not in made.asm["ptx"] and made.spilled_bytes == 0


def test_ahead_of_time_few_rows_run_on_matrix_units() -> None:
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "num_rows": "i32", "num_outputs": "i32:16"}
    types |= {"x_stride": "i32:16", "weight_stride": "i32:16"}
    constexprs = {"bias": None, "K": 4096, "ROWS": 16, "STRIP": 64, "BLOCK_K": 256, "STAGES": 4}
    made = compile_ahead(_tile_product, types, constexprs, num_warps=4)
    assert "wgmma" in made.asm["ptx"] and made.spilled_bytes == 0
    assert "LDGSTS.E.BYPASS.128" in made.asm["sass"]


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.ones(2, 3), None, r"does not fit weight torch.float32 \[2, 3\]"),
        (torch.ones(2, 4).bfloat16(), None, "does not fit weight torch.bfloat16"),
        (torch.ones(2, 4), torch.ones(3), r"bias torch.float32 \[3\]"),
        (torch.ones(2, 4), torch.ones(2).double(), "bias torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(torch.ones(5, 4), weight, bias, library=LIBRARIES[-1])
