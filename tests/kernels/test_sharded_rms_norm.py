"""RMSNorm of channels that several ranks share, against the whole norm."""

import pytest
import torch

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.sharded_rms_norm import (
    SCALE_ROWS_LIBRARIES,
    SQUARE_SUM_LIBRARIES,
    SquareSumFunction,
    scale_rows,
    square_sum,
)
from tests.kernels.library_cases import library_cases
from tests.yardstick import check_error


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(SQUARE_SUM_LIBRARIES))
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_parts_give_the_whole_norm(
    library: Library[SquareSumFunction], device: str, dtype: torch.dtype, num_tokens: int
) -> None:
    scaling = next(own for own in SCALE_ROWS_LIBRARIES if own.name == library.name)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 70, generator=generator, dtype=torch.float64).to(dtype).to(device)
    weight = (0.5 + torch.rand(70, generator=generator, dtype=torch.float64)).to(dtype).to(device)
    parts = [slice(0, 33), slice(33, 33), slice(33, 70)]
    sums = [square_sum(x[:, part], library=library) for part in parts]
    total = torch.stack(sums).sum(0)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    scaled = [scale_rows(x[:, part], total, 70, weight[part], 1e-5, library=scaling) for part in parts]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight.to(x.dtype)

    check_error(torch.cat(scaled, 1), norm(x.double()), norm(x))


@pytest.mark.parametrize(
    ("sums", "weight"),
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(2), torch.ones(5)),
        (torch.ones(2).double(), torch.ones(4)),
        (torch.ones(2), torch.ones(4).bfloat16()),
    ],
)
def test_what_does_not_fit_is_refused(sums: torch.Tensor, weight: torch.Tensor) -> None:
    x = torch.ones(2, 4)
    scale_rows(x, torch.ones(2), 4, torch.ones(4), 1e-5, library=SCALE_ROWS_LIBRARIES[-1])
    with pytest.raises(ValueError, match="x, square_sums, weight don't fit"):
        scale_rows(x, sums, 4, weight, 1e-5, library=SCALE_ROWS_LIBRARIES[-1])
    with pytest.raises(ValueError, match=r"is not \[tokens, channels\]"):
        square_sum(x[0], library=SQUARE_SUM_LIBRARIES[-1])
