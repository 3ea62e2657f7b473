"""The dense matrix product."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.linear import LIBRARIES, LinearFunction, linear
from tests.devices import DEVICES
from tests.yardstick import check_error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("device", DEVICES)
def test_without_inputs_only_the_bias_is_left(device: str) -> None:
    """A rank whose shard of the inputs is empty still takes part in the sum."""
    x, weight, bias = torch.ones(3, 0, device=device), torch.ones(2, 0, device=device), torch.tensor([1.0, 2.0])
    assert linear(x, weight, library=LIBRARIES[-1]).tolist() == [[0.0, 0.0]] * 3
    assert linear(x, weight, bias.to(device), library=LIBRARIES[-1]).tolist() == [[1.0, 2.0]] * 3


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
