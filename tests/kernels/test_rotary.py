"""Rotary embedding and the write into the cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.reference.rms_norm import rms_norm
from dist_infer.kernels.rotary import LIBRARIES, RotaryFunction, rotary
from tests.kernels.aot import compile_ahead
from tests.kernels.library_runs import ALL_DTYPES, library_runs
from tests.yardstick import check_error, check_rounded_once

NUM_SLOTS = 300


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation as complex numbers: channel i is the real part, channel i + H / 2 the imaginary one."""
    low, high = x.chunk(2, -1)
    turned = torch.complex(low, high) * torch.complex(cos, sin)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same in the dtype of x, as Hugging Face models do it."""
    cos, sin = (torch.cat([part, part], -1)[:, None].to(x.dtype) for part in (cos, sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


@library_runs(LIBRARIES, ALL_DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(0, 2, 1, 8), (1, 3, 3, 2), (9, 9, 3, 64), (129, 1, 1, 6)],
)
def test_against_complex_numbers(
    library: Library[RotaryFunction],
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    qkv = torch.randn(shape, generator=generator).to(dtype).to(device)
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angles = 100 * torch.rand(num_tokens, head_dim // 2, generator=generator, dtype=torch.float64)
    cos, sin = angles.cos().to(angle_dtype).to(device), angles.sin().to(angle_dtype).to(device)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens].to(device)
    caches = [torch.full((NUM_SLOTS, num_kv_heads, head_dim), 7.0, dtype=dtype, device=device) for _ in range(2)]
    q = rotary(qkv, cos, sin, slots, *caches, library=library)
    parts = [num_heads, num_kv_heads, num_kv_heads]
    plain_q, plain_k, plain_v = torch.split(qkv, parts, 1)
    for ours, plain in ((q, plain_q), (caches[0][slots], plain_k)):
        truth = turn(plain.double(), cos.double(), sin.double())
        check_error(ours, truth, rotate_half(plain, cos, sin))
        check_rounded_once(ours, truth)
    assert torch.equal(caches[1][slots], plain_v)
    untouched = torch.ones(NUM_SLOTS, dtype=torch.bool, device=device).index_fill_(0, slots, False)
    assert all(bool((cache[untouched] == 7).all()) for cache in caches)


@library_runs(LIBRARIES)
@pytest.mark.parametrize("slots", [[-1, 2, -1, 0], [-1, -1, -1, -1]])
def test_slot_minus_one_is_written_nowhere(library: Library[RotaryFunction], device: str, slots: list[int]) -> None:
    caches = [torch.zeros(4, 1, 2, device=device) for _ in range(2)]
    qkv = torch.arange(1.0, 25.0, device=device).view(4, 3, 2)
    cos, sin = torch.ones(4, 1, device=device), torch.zeros(4, 1, device=device)
    q = rotary(qkv, cos, sin, torch.tensor(slots, device=device), *caches, library=library)
    assert torch.equal(q, qkv[:, :1])
    for part, cache in enumerate(caches, 1):
        expected = torch.zeros(4, 1, 2, device=device)
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = qkv[row, part]
        assert torch.equal(cache, expected)


@library_runs(LIBRARIES, [torch.float64, torch.float32])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 12])
def test_a_part_of_the_channels_in_halves_or_neighbours(
    library: Library[RotaryFunction], device: str, dtype: torch.dtype, rotary_dim: int, interleaved: bool
) -> None:
    """The channels of a pair are the same numbers wherever they stand: sorting them into halves gives the plain op."""
    generator = torch.Generator().manual_seed(rotary_dim)
    qkv = torch.randn(5, 4, 12, generator=generator, dtype=dtype).to(device)
    angles = 100 * torch.rand(5, rotary_dim // 2, generator=generator, dtype=dtype).to(device)
    caches = [torch.zeros(9, 1, 12, dtype=dtype, device=device) for _ in range(2)]
    slots = torch.tensor([3, 0, 8, -1, 2], device=device)
    args = (angles.cos(), angles.sin(), slots, *caches)
    q = rotary(qkv, *args, interleaved=interleaved, library=library)
    order = torch.arange(rotary_dim)
    if interleaved:
        order = torch.cat([order[::2], order[1::2]])
    keys = torch.zeros(5, 1, 12, dtype=dtype, device=device)
    keys[slots >= 0] = caches[0][slots[slots >= 0]]
    for ours, plain in ((q, qkv[:, :2]), (keys[slots >= 0], qkv[:, 2:3][slots >= 0])):
        turned_angles = angles if len(ours) == 5 else angles[slots >= 0]
        truth = turn(
            plain[..., order].double(), *(part.double() for part in (turned_angles.cos(), turned_angles.sin()))
        )
        atol = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(ours[..., order].double(), truth, rtol=0, atol=atol)
        assert torch.equal(ours[..., rotary_dim:], plain[..., rotary_dim:])


@library_runs(LIBRARIES, ALL_DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(3, 4, 2, 16, 16), (70, 5, 3, 10, 6)]
)
def test_heads_are_normed_and_rounded_before_they_turn(
    library: Library[RotaryFunction],
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    """As the norm and the rotation one after the other; values and the slots of others are left alone."""
    generator = torch.Generator().manual_seed(num_tokens)
    parts = [num_heads, num_kv_heads, num_kv_heads]
    qkv = (3 * torch.randn(num_tokens, sum(parts), head_dim, generator=generator)).to(dtype).to(device)
    weights = [(1 + torch.randn(head_dim, generator=generator)).to(dtype).to(device) for _ in range(2)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = 100 * torch.rand(num_tokens, rotary_dim // 2, generator=generator, dtype=wide).to(device)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens].to(device)

    def run(x: Tensor, library: Library[RotaryFunction], **norm: Any) -> tuple[Tensor, list[Tensor]]:
        caches = [torch.full((NUM_SLOTS, num_kv_heads, head_dim), 7.0, dtype=dtype, device=device) for _ in range(2)]
        return rotary(x, angles.cos(), angles.sin(), slots, *caches, library=library, **norm), caches

    q, caches = run(qkv, library, q_weight=weights[0], k_weight=weights[1], eps=1e-3)
    plain = torch.split(qkv, parts, 1)
    normed = [
        rms_norm(x.reshape(-1, head_dim), weight, 1e-3, None)[0].view(x.shape)
        for x, weight in zip(plain[:2], weights, strict=True)
    ]
    expected_q, expected_caches = run(torch.cat([*normed, plain[2]], 1), LIBRARIES[-1])
    assert torch.equal(caches[1], expected_caches[1])
    for ours, expected in ((q, expected_q), (caches[0], expected_caches[0])):
        if library.name == "torch":
            assert torch.equal(ours, expected)
        else:  # a norm that rounds to the other neighbour moves both channels of a pair
            torch.testing.assert_close(ours, expected, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
            assert (ours != expected).float().mean() < 0.02 or dtype == torch.float32


def test_weights_of_one_kind_only_are_refused() -> None:
    with pytest.raises(ValueError, match="both or none"):
        rotary(**good_arguments(), q_weight=torch.ones(6), library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=r"must be torch.float32 \[6\]"):
        rotary(**good_arguments(), q_weight=torch.ones(6), k_weight=torch.ones(5), library=LIBRARIES[-1])


def test_compiled_ahead_of_time() -> None:
    """Heads of 128 channels move by 16 bytes, all in registers."""
    from dist_infer.kernels.triton.rotary import _rotary_kernel

    pointers = ("qkv", "q_weight", "k_weight", "out", "k_cache", "v_cache")
    signature = dict.fromkeys(pointers, "*bf16") | {"cos": "*fp32", "sin": "*fp32", "slots": "*i64", "eps": "fp32"}
    sizes = ("num_tokens", "num_heads", "num_kv_heads")
    signature |= dict.fromkeys(sizes, "i32")
    signature |= dict.fromkeys(("token_stride", "angle_stride", "slot_stride"), "i32:16")
    constexprs = {"HEAD_DIM": 128, "HALF": 64, "INTERLEAVED": False, "HAS_NORM": True, "TOKENS": 1, "HEADS": 8}
    constexprs |= {"HALF_BLOCK": 64, "REST_BLOCK": 0, "OVERLAP": True}
    compiled = compile_ahead(_rotary_kernel, signature, constexprs, num_warps=2)
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert compiled.spilled_bytes == 0


def good_arguments() -> dict[str, Any]:
    return {
        "qkv": torch.ones(2, 4, 6),
        "cos": torch.ones(2, 3),
        "sin": torch.ones(2, 3),
        "slots": torch.zeros(2, dtype=torch.int64),
        "k_cache": torch.ones(5, 1, 6),
        "v_cache": torch.ones(5, 1, 6),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qkv", torch.ones(2, 2, 6), "shapes of qkv"),
        ("cos", torch.ones(2, 6), "shapes of qkv"),
        ("slots", torch.zeros(3, dtype=torch.int64), "shapes of qkv"),
        ("v_cache", torch.ones(5, 2, 6), "shapes of qkv"),
        ("k_cache", torch.ones(5, 1, 6).bfloat16(), "dtypes of qkv"),
        ("sin", torch.ones(2, 3).double(), "dtypes of qkv"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Tensor, message: str) -> None:
    rotary(**good_arguments(), library=LIBRARIES[-1])
    with pytest.raises(ValueError, match=message):
        rotary(**{**good_arguments(), name: value}, library=LIBRARIES[-1])
