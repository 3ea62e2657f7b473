"""Rotation and cache write of latent attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.mla_rotary import LIBRARIES, MlaRotaryFunction, mla_rotary
from dist_infer.kernels.reference.quantize import to_e4m3
from tests.kernels.aot import compile_ahead
from tests.kernels.library_runs import ALL_DTYPES, library_runs
from tests.yardstick import check_error, check_rounded_once


def turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The rotation as complex numbers, in float64."""
    order = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(8))  # first and second of each pair
    low, high = x[..., order].double().chunk(2, -1)
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)
    result = torch.empty_like(x, dtype=torch.float64)
    result[..., order] = torch.cat([turned.real, turned.imag], -1)
    return result


@library_runs(LIBRARIES, ALL_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 129])
def test_against_complex_numbers(
    library: Library[MlaRotaryFunction], device: str, dtype: torch.dtype, interleaved: bool, num_tokens: int
) -> None:
    """Latent and key are parts of wider rows, as a projection leaves them."""
    generator = torch.Generator().manual_seed(num_tokens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    q, down, weight = random(num_tokens, 3, 10 + 8), 2 * random(num_tokens, 20), random(12)
    latent, key = down[:, :12], down[:, 12:]
    angles = 100 * random(num_tokens, 4, dtype=torch.float64)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    slots = torch.randperm(200, generator=generator)[:num_tokens].to(device)
    slots[::5] = -1
    cache = torch.full((200, 20), 7.0, dtype=dtype, device=device)
    plain, turned = q[..., :10].clone(), turn(q[..., 10:], angles[:, None], interleaved)
    out = mla_rotary(q, latent, key, weight, 1e-3, cos, sin, slots, cache, interleaved=interleaved, library=library)
    assert torch.equal(out[..., :10], plain)
    rows = slots >= 0
    untouched = torch.ones(200, dtype=torch.bool, device=device).index_fill_(0, slots[rows], False)
    assert bool((cache[untouched] == 7).all())
    norm = latent.double() * (latent.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight.double()
    written = cache[slots[rows]]
    for ours, truth in (
        (out[..., 10:], turned),
        (written[:, :12], norm[rows]),
        (written[:, 12:], turn(key, angles, interleaved)[rows]),
    ):
        check_error(ours, truth, truth.to(wide).to(dtype), factor=4.0)
        check_rounded_once(ours, truth)


@library_runs(LIBRARIES, ALL_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_cache_of_e4m3_holds_what_a_wide_one_would(
    library: Library[MlaRotaryFunction], device: str, dtype: torch.dtype, interleaved: bool
) -> None:
    """Byte for byte: the quantised form of what the same library writes to a cache in the dtype of the latents."""
    generator = torch.Generator().manual_seed(3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape: int, factor: float = 1.0) -> Tensor:
        return (factor * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype).to(device)

    latent, key, weight = random(9, 12), random(9, 8, factor=300.0), random(12)
    latent[4, 2] = torch.nan
    angles = torch.randn(9, 4, generator=generator, dtype=torch.float64).to(device)
    slots = torch.tensor([5, 0, -1, 17, 3, 19, 8, 9, 11], device=device)
    plain = torch.full((20, 20), 7.0, dtype=dtype, device=device)
    scale = torch.tensor([0.7], device=device)
    narrow = torch.full((20, 20), 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    for cache, cache_scale in ((plain, None), (narrow, scale)):
        mla_rotary(
            random(9, 3, 18),
            latent,
            key,
            weight,
            1e-3,
            angles.cos().to(wide),
            angles.sin().to(wide),
            slots,
            cache,
            interleaved=interleaved,
            cache_scale=cache_scale,
            library=library,
        )
    expected = to_e4m3(plain.float() * (1 / scale)).view(torch.uint8)
    rows = slots[slots >= 0]
    assert torch.equal(narrow.view(torch.uint8)[rows], expected[rows])
    assert {*narrow[rows].float().abs().nan_to_num(500.0).flatten().tolist()} >= {448.0, 500.0}, "cut, and NaN"
    others = torch.ones(20, dtype=torch.bool, device=device).index_fill_(0, rows, False)
    assert (narrow.view(torch.uint8)[others] == 0x55).all()


def good_arguments() -> dict[str, Any]:
    return {
        "q": torch.ones(2, 3, 6),
        "latent": torch.ones(2, 5),
        "key": torch.ones(2, 4),
        "weight": torch.ones(5),
        "eps": 1e-6,
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
        ("weight", torch.ones(6), "shapes of q"),
        ("cos", torch.ones(2, 4), "shapes of q"),
        ("slots", torch.zeros(3, dtype=torch.int64), "shapes of q"),
        ("cache", torch.ones(7, 9).bfloat16(), "dtypes of q"),
        ("sin", torch.ones(2, 2).double(), "dtypes of q"),
        ("cache", torch.ones(7, 9).to(torch.float8_e4m3fn), "dtypes of q"),
        ("cache_scale", torch.ones(1), "dtypes of q"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: torch.Tensor, message: str) -> None:
    mla_rotary(**good_arguments(), library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=message):
        mla_rotary(**{**good_arguments(), name: value}, library=LIBRARIES[-1])


@pytest.mark.parametrize("narrow", [False, True])
def test_compiled_ahead_of_time(narrow: bool) -> None:
    from dist_infer.kernels.triton.mla_rotary import _mla_rotary_kernel

    signature = dict.fromkeys(("q", "latent", "key", "weight", "cache"), "*bf16") | {"slots": "*i64", "eps": "fp32"}
    signature |= {"cos": "*fp32", "sin": "*fp32", "num_tokens": "i32", "num_heads": "i32"}
    strides = ("token_stride", "head_stride", "latent_stride", "key_stride", "angle_stride", "slot_stride")
    signature |= dict.fromkeys(strides, "i32:16")
    constexprs: dict[str, object] = {
        "PLAIN_DIM": 128,
        "LATENT_DIM": 512,
        "HALF": 32,
        "INTERLEAVED": False,
        "TOKENS": 1,
        "HEADS": 16,
    }
    constexprs |= {"HALF_BLOCK": 32, "LATENT_BLOCK": 512, "OVERLAP": True, "HAS_SCALE": narrow}
    if narrow:
        signature |= {"cache": "*fp8e4nv", "cache_scale": "*fp32"}
    else:
        constexprs["cache_scale"] = None
    compiled = compile_ahead(_mla_rotary_kernel, signature, constexprs, num_warps=4)
    assert "ld.global.v2.b32" in compiled.asm["ptx"]  # of 512 channels a thread of 128 holds four
    assert compiled.spilled_bytes == 0
