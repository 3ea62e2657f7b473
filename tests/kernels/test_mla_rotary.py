"""Rotation and cache write of latent attention."""

from typing import Any

import pytest
import torch

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.mla_rotary import LIBRARIES, MlaRotaryFunction, mla_rotary
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 129])
def test_against_complex_numbers(
    device: str, library: Library[MlaRotaryFunction], interleaved: bool, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    q, latent, key = random(num_tokens, 3, 10 + 8), random(num_tokens, 12), random(num_tokens, 8)
    angles = 100 * random(num_tokens, 4)
    slots = torch.randperm(200, generator=generator)[:num_tokens].to(device)
    slots[::5] = -1
    cache = torch.full((200, 20), 7.0, dtype=torch.float64, device=device)
    out = mla_rotary(q, latent, key, angles.cos(), angles.sin(), slots, cache, interleaved=interleaved, library=library)
    order = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(8))  # first and second of each pair

    def turn(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        low, high = x[..., order].chunk(2, -1)
        turned = torch.complex(low, high) * torch.polar(torch.ones_like(by), by)
        result = torch.empty_like(x)
        result[..., order] = torch.cat([turned.real, turned.imag], -1)
        return result

    truth = torch.cat([q[..., :10], turn(q[..., 10:], angles[:, None])], -1)
    torch.testing.assert_close(out, truth, rtol=0, atol=1e-12)
    written = torch.cat([latent, turn(key, angles)], 1)
    expected = torch.full_like(cache, 7.0)
    expected[slots[slots >= 0]] = written[slots >= 0]
    torch.testing.assert_close(cache, expected, rtol=0, atol=1e-12)


def good_arguments() -> dict[str, Any]:
    return {
        "q": torch.ones(2, 3, 6),
        "latent": torch.ones(2, 5),
        "key": torch.ones(2, 4),
        "cos": torch.ones(2, 2),
        "sin": torch.ones(2, 2),
        "slots": torch.zeros(2, dtype=torch.int64),
        "cache": torch.ones(7, 9),
        "interleaved": True,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.ones(2, 3, 3), "shapes of q"),
        ("q", torch.ones(3, 3, 6), "shapes of q"),
        ("latent", torch.ones(2, 6), "shapes of q"),
        ("cos", torch.ones(2, 4), "shapes of q"),
        ("slots", torch.zeros(3, dtype=torch.int64), "shapes of q"),
        ("cache", torch.ones(7, 9).bfloat16(), "dtypes of q"),
        ("sin", torch.ones(2, 2).double(), "dtypes of q"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: torch.Tensor, message: str) -> None:
    mla_rotary(**good_arguments(), library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=message):
        mla_rotary(**{**good_arguments(), name: value}, library=LIBRARIES[-1])
