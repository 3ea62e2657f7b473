"""A matrix product added to something: the bytes of the product and then the addition."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.added_linear import LIBRARIES, AddedLinearFunction, added_linear
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.linear import LIBRARIES as LINEAR_LIBRARIES
from dist_infer.kernels.linear import linear
from dist_infer.kernels.triton.linear import one_row
from tests.kernels.library_cases import library_cases
from tests.kernels.triton_interpreter import TRITON_DEVICES
from tests.yardstick import check_error


def made(dtype: torch.dtype, device: str, num_tokens: int, inputs: int, outputs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, inputs), (outputs, inputs), (outputs,), (num_tokens, outputs)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize(("num_tokens", "inputs", "outputs"), [(0, 5, 3), (1, 64, 40), (17, 32, 9), (3, 0, 4)])
def test_is_the_product_and_then_the_addition(
    library: Library[AddedLinearFunction], device: str, dtype: torch.dtype, num_tokens: int, inputs: int, outputs: int
) -> None:
    x, weight, bias, added = made(dtype, device, num_tokens, inputs, outputs)
    kept = added.clone()
    out = added_linear(x, weight, bias, added, library=library)
    torch_ops = linear(x, weight, bias, library=LINEAR_LIBRARIES[-1]) + added
    truth = linear(x.double(), weight.double(), bias.double(), library=LINEAR_LIBRARIES[-1]) + added.double()
    assert out.is_contiguous() and torch.equal(added, kept)
    check_error(out, truth, torch_ops)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [7, 40])
def test_fused_bytes_are_those_of_two_kernels(device: str, dtype: torch.dtype, outputs: int) -> None:
    x, weight, bias, added = made(dtype, device, 1, 528, outputs)
    expected = one_row(x, weight, bias, gated_by=None) + added
    assert torch.equal(one_row(x, weight, bias, gated_by=None, added=added), expected)


@pytest.mark.parametrize(
    ("weight", "bias", "added", "message"),
    [
        (torch.ones(2, 3), None, torch.ones(5, 2), r"does not fit weight torch.float32 \[2, 3\]"),
        (torch.ones(3, 4), torch.ones(2), torch.ones(5, 3), "bias torch.float32"),
        (torch.ones(3, 4), None, torch.ones(5, 4), "can't be added to 5 x 3"),
        (torch.ones(3, 4), None, torch.ones(5, 3).bfloat16(), "torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Tensor, bias: Tensor | None, added: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        added_linear(torch.ones(5, 4), weight, bias, added, library=LIBRARIES[-1])
