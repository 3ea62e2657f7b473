"""The interpreter against torch: casts, arithmetic, matrix products and inline assembly on narrow formats.

On a GPU the same cases run on it, so both agree with torch and so with each other.
"""

import math

import pytest
import torch
import triton
from torch import Tensor

from tests.kernels import device_code, triton_interpreter
from tests.kernels.triton_interpreter import TRITON_DEVICES

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
EDGES = [448.0, 464.0, 465.0, 480.0, 500.0, 6e4, 1e6, math.inf, 2**-9, 2**-10, 3 * 2**-10, 0.0, 31.6, 25.0, 1 + 2**-8]
EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)


def same_bits(ours: Tensor, expected: Tensor) -> bool:
    """Equal byte by byte, so that zeros of both signs differ."""
    return torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.numel(), dtype=dtype, device=x.device)
    device_code.cast[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
    return out


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@EVERY_DEVICE
@pytest.mark.parametrize("source", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, BF16, torch.float16, E4M3, E5M2])
def test_casts_round_to_nearest_and_float8_saturates(device: str, source: torch.dtype, target: torch.dtype) -> None:
    x = torch.cat([normal(1000) * 100, torch.tensor(EDGES), -torch.tensor(EDGES)]).to(source).to(device)
    expected = x
    if target in (E4M3, E5M2):
        largest = torch.finfo(target).max
        expected = x.float().clamp(-largest, largest)
    assert same_bits(cast(x, target), expected.to(target))


@EVERY_DEVICE
@pytest.mark.parametrize(
    ("source", "target"),  # not from e5m2 to bfloat16, where Triton 3.6 makes numbers of infinity and NaN
    [(E4M3, torch.float32), (E4M3, BF16), (E4M3, torch.float16), (E5M2, torch.float32), (E5M2, torch.float16)],
)
def test_every_float8_code_is_read(device: str, source: torch.dtype, target: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(source)
    ours, expected = cast(codes, target), codes.to(target)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


@EVERY_DEVICE
@pytest.mark.parametrize(("source", "target"), [(torch.int32, BF16), (BF16, torch.int32)])
def test_integers_to_bfloat16_and_back(device: str, source: torch.dtype, target: torch.dtype) -> None:
    x = torch.arange(-300, 300, device=device).to(source)
    assert torch.equal(cast(x, target), x.to(target))


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_arithmetic(device: str, dtype: torch.dtype) -> None:
    x, y = (normal(64, seed=seed).to(dtype).to(device) for seed in (1, 2))
    out = torch.empty(10, 64, dtype=dtype, device=device)
    device_code.arithmetic[(1,)](x, y, out, BLOCK=64)
    one = torch.ones((), dtype=dtype, device=device)
    quotient = (x.float() / y.float()).to(dtype)
    fused = (x.double() * y.double() + x.double()).to(dtype)
    clamped = torch.maximum(x, y).minimum(y + one)
    rows = [
        x + y,
        x - y,
        x * y,
        quotient,
        torch.maximum(x, y),
        fused,
        clamped,
        -x,
        x.abs(),
        torch.where(x > y, x, y * 2),
    ]
    for row, expected in enumerate(rows):
        torch.testing.assert_close(out[row], expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_reductions(device: str, dtype: torch.dtype) -> None:
    x = torch.randint(-8, 8, (4, 16), generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    out = torch.empty(3, 4, dtype=dtype, device=device)
    device_code.reduce[(1,)](x, out, ROWS=4, COLUMNS=16)
    assert torch.equal(out, torch.stack([x.sum(1), x.amax(1), x.amin(1)]))


@EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, E4M3])
def test_dot(device: str, dtype: torch.dtype) -> None:
    a, b = (normal(32, 32, seed=seed).to(dtype).to(device) for seed in (1, 2))
    out = torch.empty(32, 32, device=device)
    device_code.dot[(1,)](a, b, out, SIZE=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@EVERY_DEVICE
def test_inline_assembly(device: str) -> None:
    x = torch.cat([torch.rand(63, generator=torch.Generator().manual_seed(0)) + 0.5, torch.tensor([2.0**-127])])
    out = torch.empty(64, device=device)
    device_code.reciprocal[(1,)](x.to(device), out, BLOCK=64)
    torch.testing.assert_close(out[:63].cpu(), 1 / x[:63])
    assert out[63] == math.inf  # a denormal was flushed to zero


@pytest.mark.skipif(not triton_interpreter.is_on(), reason="host: with a GPU Triton does not interpret")
def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(Exception, match=r"cos\.approx\.f32.*INLINE_ASM"):
        device_code.unknown_instruction[(1,)](torch.ones(32), torch.ones(32), BLOCK=32)
