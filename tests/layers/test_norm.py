"""The norm layers."""

import pytest
import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.kernels.carriers import Fp8Tensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.norm import InputNorm, RmsNorm
from dist_infer.layers.setup import LayerSetup
from tests.devices import DEVICES
from tests.layers.setups import close, fill, random, setup_of


def test_norm_of_the_sum() -> None:
    norm = RmsNorm(5, 1e-3, setup_of(SingleCollectives()))
    fill(norm.weight_slots("n."), {"n.weight": random(5, seed=1)})
    x, residual = random(3, 5), random(3, 5, seed=2)
    normed, total = norm(x, residual)
    close(total, x + residual)
    close(normed, torch.nn.functional.rms_norm(x + residual, (5,), random(5, seed=1), 1e-3))
    close(norm(x)[0], torch.nn.functional.rms_norm(x, (5,), random(5, seed=1), 1e-3))


def input_norm(device: str, dtype: torch.dtype, wanted: QuantFormat | None, notes: list[str], orders: str) -> InputNorm:
    setup = LayerSetup(
        tp=SingleCollectives(),
        dtype=dtype,
        device=torch.device(device),
        kernel_orders={"quantize": orders},
        on_choice=notes.append,
    )
    norm = InputNorm(256, 1e-3, setup, wanted)
    norm.weight.copy_(random(256, seed=1))
    return norm


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [QuantFormat.FP8_ROWS, QuantFormat.FP8_BLOCK128], ids=str)
def test_one_launch_has_the_bytes_of_two(wanted: QuantFormat, dtype: torch.dtype, device: str) -> None:
    norm = input_norm(device, dtype, wanted, [], "")
    assert norm.gives is wanted
    x, residual = (random(7, 256, seed=seed).to(device, dtype) for seed in (2, 3))
    for added in (None, residual):
        normed, total = norm(x, added)
        given, given_total = norm.quantized(x, added)
        expected = norm.convert(normed)
        assert isinstance(given, Fp8Tensor) and isinstance(expected, Fp8Tensor)
        assert torch.equal(given_total, total) and torch.equal(given.scales, expected.scales)
        assert torch.equal(given.data.view(torch.uint8), expected.data.view(torch.uint8))


def test_what_stands_down() -> None:
    notes: list[str] = []
    norm = input_norm("cpu", torch.bfloat16, None, notes, "")
    x = random(2, 256).bfloat16()
    assert norm.gives is None and norm.convert(x) is x
    assert torch.equal(norm.quantized(x, None)[0], norm(x)[0])  # type: ignore[arg-type]
    assert not any("rms_norm_quant" in note for note in notes)
    wide = input_norm("cpu", torch.float64, QuantFormat.FP8_ROWS, notes, "")
    assert wide.gives is None
    assert notes[-1] == "norms of 256 leave fp8_rows to their consumers: they are torch.float64"


@pytest.mark.gpu
def test_libraries_that_may_differ_stand_down() -> None:
    notes: list[str] = []
    assert input_norm("cuda", torch.bfloat16, QuantFormat.FP8_ROWS, notes, "torch").gives is None
    assert notes[-1] == "norms of 256 leave fp8_rows to their consumers: libraries triton, triton, torch"
