"""RMSNorm: rounding points, the residual addition, refusal of what doesn't fit."""

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.rms_norm import LIBRARIES, RmsNormFunction, rms_norm
from dist_infer.kernels.triton.rms_norm import _rms_norm, tile_of
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases
from tests.yardstick import check_error, check_rounded_once

EPS = 1e-5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def formula(total: Tensor, weight: Tensor) -> Tensor:
    wide = total.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 63), (1, 1), (7, 129), (13, 63), (3, 576)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_against_the_formula(
    device: str,
    library: Library[RmsNormFunction],
    dtype: torch.dtype,
    num_tokens: int,
    hidden: int,
    with_residual: bool,
) -> None:
    generator = torch.Generator().manual_seed(num_tokens + hidden)
    x, residual = (torch.randn(num_tokens, hidden, generator=generator).to(dtype).to(device) for _ in range(2))
    weight = (torch.rand(hidden, generator=generator) + 0.5).to(dtype).to(device)
    normed, total = rms_norm(x, weight, EPS, residual if with_residual else None, library=library)
    expected_total = x + residual if with_residual else x
    assert torch.equal(total, expected_total)
    truth = formula(expected_total, weight)
    yardstick = torch.nn.functional.rms_norm(expected_total, (hidden,), weight, EPS)
    check_error(normed, truth, yardstick)
    check_rounded_once(normed, truth)


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
def test_a_row_gets_the_same_bytes_wherever_it_lies(
    device: str, library: Library[RmsNormFunction], dtype: torch.dtype
) -> None:
    """Alone or among others, in a wider matrix or off a 16-byte boundary."""
    generator = torch.Generator().manual_seed(0)
    wide, residual = (torch.randn(5, 200, generator=generator).to(dtype).to(device) for _ in range(2))
    weight = torch.randn(96, generator=generator).to(dtype).to(device)
    for first in (0, 16, 33):
        x, added = wide[:, first : first + 96], residual[:, first : first + 96]
        together = rms_norm(x, weight, EPS, added, library=library)
        for row in range(5):
            alone = rms_norm(x[row : row + 1].contiguous(), weight, EPS, added[row : row + 1], library=library)
            assert torch.equal(alone[0][0], together[0][row]) and torch.equal(alone[1][0], together[1][row])


@pytest.mark.parametrize(("dtype", "hidden"), [("bf16", 4096), ("bf16", 7168), ("fp32", 4096)])
def test_ahead_of_time_loads_are_wide(dtype: str, hidden: int) -> None:
    tile, num_warps = tile_of(hidden)
    types = dict.fromkeys(("x", "residual", "weight", "normed", "total"), f"*{dtype}")
    types |= {"x_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32"}
    made = compile_ahead(_rms_norm, types, {"HIDDEN": hidden, "TILE": tile, "OVERLAP": True}, num_warps=num_warps)
    assert "ld.global.v4.b32" in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]
    assert "ld.global.b" not in made.asm["ptx"] and made.spilled_bytes == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_eps_bounds_small_rows(dtype: torch.dtype) -> None:
    """A row of zeros stays zero, and one far below sqrt(eps) is divided by about sqrt(eps)."""
    x = torch.tensor([[0.0, 0.0], [1e-4, -1e-4]]).to(dtype)
    normed, _ = rms_norm(x, torch.ones(2).to(dtype), EPS, library=LIBRARIES[-1])
    check_rounded_once(normed, formula(x, torch.ones(2)))
    assert normed[0].tolist() == [0.0, 0.0]
    assert normed[1].tolist() == pytest.approx([1e-4 / EPS**0.5, -1e-4 / EPS**0.5], rel=1e-2)


def test_variance_is_that_of_the_rounded_sum() -> None:
    """256 + 1 is 256 in bfloat16: the norm must see 256, as a later layer does."""
    x, residual = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 1.0]]).bfloat16()
    normed, total = rms_norm(x, torch.ones(2).bfloat16(), 0.0, residual, library=LIBRARIES[-1])
    assert total.tolist() == [[256.0, 2.0]]
    assert normed[0, 1].item() == torch.tensor(2 / ((256**2 + 4) / 2) ** 0.5).bfloat16().item()


def test_nan_stays_in_its_row() -> None:
    x = torch.ones(3, 5)
    x[1, 2] = torch.nan
    normed, _ = rms_norm(x, torch.ones(5), EPS, library=LIBRARIES[-1])
    assert normed.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("weight", "residual", "message"),
    [
        (torch.ones(3), None, r"does not fit weight torch.float32 \[3\]"),
        (torch.ones(4).double(), None, "does not fit weight torch.float64"),
        (torch.ones(4), torch.ones(1, 4), r"residual torch.float32 \[1, 4\] differs"),
        (torch.ones(4), torch.ones(2, 4).bfloat16(), "residual torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Tensor, residual: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(torch.ones(2, 4), weight, EPS, residual, library=LIBRARIES[-1])
