"""The product of gates and ups with its activation."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.gated_linear import LIBRARIES, GatedLinearFunction, gated_linear
from dist_infer.kernels.linear import LIBRARIES as LINEAR_LIBRARIES
from dist_infer.kernels.linear import linear
from dist_infer.kernels.silu_mul import LIBRARIES as SILU_MUL_LIBRARIES
from dist_infer.kernels.silu_mul import silu_mul
from dist_infer.kernels.triton.linear import one_row
from tests.kernels.library_cases import library_cases
from tests.kernels.triton_interpreter import TRITON_DEVICES
from tests.yardstick import check_error


def made(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize(("num_tokens", "inputs", "channels"), [(0, 5, 3), (1, 63, 40), (17, 32, 9), (3, 0, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_is_the_product_and_then_the_activation(
    library: Library[GatedLinearFunction],
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    inputs: int,
    channels: int,
    with_bias: bool,
) -> None:
    x, weight, bias = made(dtype, device, (num_tokens, inputs), (2 * channels, inputs), (2 * channels,))
    own_bias = bias if with_bias else None
    products = linear(x, weight, own_bias, library=LINEAR_LIBRARIES[-1])
    out = gated_linear(x, weight, own_bias, library=library)
    assert out.is_contiguous()
    truth = silu_mul(products.double(), library=SILU_MUL_LIBRARIES[-1])
    check_error(out, truth, silu_mul(products, library=SILU_MUL_LIBRARIES[-1]))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "channels"), [(1024, 7), (528, 20)])
def test_fused_bytes_are_those_of_two_kernels(device: str, dtype: torch.dtype, inputs: int, channels: int) -> None:
    x, weight, bias = made(dtype, device, (1, inputs), (2 * channels, inputs), (2 * channels,))
    products = one_row(x, weight, bias, gated_by=None)
    assert torch.equal(
        one_row(x, weight, bias, gated_by=GatedActivation.SILU), silu_mul(products, library=SILU_MUL_LIBRARIES[0])
    )


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.ones(2, 3), None, r"does not fit weight torch.float32 \[2, 3\]"),
        (torch.ones(3, 4), None, r"weight \[3, 4\] is not gates and ups"),
        (torch.ones(2, 4), torch.ones(1), "its bias does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_linear(torch.ones(5, 4), weight, bias, library=LIBRARIES[-1])
