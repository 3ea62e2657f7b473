"""Angles of the rotary embedding on both kinds of implementation."""

import math

import pytest
import torch

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.rotary_angles import LIBRARIES, RotaryAnglesFunction, rotary_angles
from tests.kernels.aot import compile_ahead
from tests.kernels.library_runs import library_runs


@library_runs(LIBRARIES, [torch.float64, torch.float32])
@pytest.mark.parametrize("positions", [[], [0], [3, 1_000_001, 7, 131_071, 0]])
def test_angles_are_exact_and_rounded_once(
    library: Library[RotaryAnglesFunction], device: str, dtype: torch.dtype, positions: list[int]
) -> None:
    frequencies = 10000.0 ** -(torch.arange(33, dtype=torch.float64) / 33)
    factor = torch.tensor(0.1 * math.log(40) + 1, dtype=torch.float64)
    steps = torch.tensor(positions, dtype=torch.int64)
    found = rotary_angles(steps.to(device), frequencies.to(device), factor.to(device), dtype=dtype, library=library)
    for ours, function in zip(found, (math.cos, math.sin), strict=True):
        truth = [[function(p * f) * factor.item() for f in frequencies.tolist()] for p in positions]
        expected = torch.tensor(truth, dtype=torch.float64).view(len(positions), 33)
        assert ours.dtype == dtype
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.cpu().double(), expected.to(dtype).double(), rtol=0, atol=1e-14)


def test_what_does_not_fit_is_refused() -> None:
    one = torch.ones(3, dtype=torch.float64)
    for positions, frequencies, factor in (
        (torch.arange(2, dtype=torch.int32), one, one[0]),
        (torch.arange(2), one.float(), one[0]),
        (torch.arange(2), one, one),
    ):
        with pytest.raises(ValueError, match="don't fit"):
            rotary_angles(positions, frequencies, factor, dtype=torch.float32, library=LIBRARIES[-1])


def test_compiled_ahead_of_time() -> None:
    from dist_infer.kernels.triton.rotary_angles import _angles_kernel

    pointers = {"positions": "*i64", "frequencies": "*fp64", "factor": "*fp64", "cos": "*fp32", "sin": "*fp32"}
    compiled = compile_ahead(
        _angles_kernel, pointers | {"num_angles": "i32"}, {"NUM_PAIRS": 64, "BLOCK": 128, "OVERLAP": True}
    )
    assert "f64" in compiled.asm["ptx"]
