"""The gated activation."""

import pytest
import torch

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.silu_mul import LIBRARIES, SiluMulFunction, silu_mul
from dist_infer.kernels.triton.silu_mul import _silu_mul
from tests.kernels.aot import compile_ahead
from tests.kernels.library_cases import library_cases
from tests.yardstick import check_error, check_rounded_once


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES))
@pytest.mark.parametrize("activation", GatedActivation)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 63), (1, 1), (9, 129), (129, 0)])
def test_against_the_formula(
    device: str,
    library: Library[SiluMulFunction],
    dtype: torch.dtype,
    activation: GatedActivation,
    num_tokens: int,
    width: int,
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    gate_up = (6 * torch.randn(num_tokens, 2 * width, generator=generator)).to(dtype).to(device)
    gate, up = gate_up.double().chunk(2, 1)
    out = silu_mul(gate_up, activation=activation, library=library)
    assert out.is_contiguous()
    if activation is GatedActivation.SILU:
        yardstick = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
        truth = gate / (1 + (-gate).exp()) * up
    else:
        narrow = gate_up[:, :width].clamp(max=7)
        yardstick = narrow * (1.702 * narrow).sigmoid() * (gate_up[:, width:].clamp(-7, 7) + 1)
        gate = gate.clamp(max=7)
        truth = gate / (1 + (-1.702 * gate).exp()) * (up.clamp(-7, 7) + 1)
    check_error(out, truth, yardstick)
    check_rounded_once(out, truth)


def test_ahead_of_time_loads_are_wide() -> None:
    types = {"gate_up": "*bf16", "out": "*bf16", "row_stride": "i32:16", "num_channels": "i32:16"}
    made = compile_ahead(_silu_mul, types, {"ACTIVATION": "silu", "BLOCK": 1024, "OVERLAP": True}, num_warps=4)
    assert "ld.global.v4.b32" in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[1000.0, -1000.0, 2.0, 3.0]])
    assert silu_mul(gate_up, library=LIBRARIES[-1]).tolist() == [[2000.0, 0.0]]


def test_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] is not \[tokens, 2 \* intermediate\]"):
        silu_mul(torch.ones(2, 3), library=LIBRARIES[-1])


@pytest.mark.parametrize(("library", "device", "dtype"), library_cases(LIBRARIES, (torch.float32,)))
def test_swigluoai_keeps_nan(device: str, library: Library[SiluMulFunction], dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, -float("inf"), 1.0, float("nan"), 1.0]], dtype=dtype, device=device)
    out = silu_mul(gate_up, activation=GatedActivation.SWIGLUOAI, library=library)
    assert out.isnan().tolist() == [[True, True, True]]
