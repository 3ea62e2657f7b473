"""The checks that other tests rest on see what they are for."""

import pytest
import torch

from tests.yardstick import check_rounded_once


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_second_rounding_is_seen(dtype: torch.dtype) -> None:
    """Of a product before its bias is added. One rounding is taken, of sums in float32 too."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, 528), (9, 528), (9,)))
    truth = x.double() @ weight.double().T + bias.double()
    in_float32 = x.float() @ weight.float().T
    check_rounded_once((in_float32 + bias.float()).to(dtype), truth)
    with pytest.raises(AssertionError, match="rounded once"):
        check_rounded_once((in_float32.to(dtype) + bias), truth)
