"""Rotation, norm and cache write of latent attention in one Triton kernel; the contract stands in
kernels/mla_rotary.py.

Some programs turn the last channels of query heads where they stand; one more for each block of tokens norms their
latents, turns their keys and writes both to the cache. T tokens, N heads, L latent, P plain and R rotated channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.number_formats import to_e4m3
from dist_infer.kernels.triton.rotary import turn_rows

_ROWS = 32  # heads of tokens that a program of a large step takes


def mla_rotary(
    q: Tensor,
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
    cache_scale: Tensor | None,
) -> Tensor:
    """See `dist_infer.kernels.mla_rotary.mla_rotary`; the queries are turned in place."""
    if not all(x.stride(-1) == 1 for x in (q, latent, key, cache)):
        raise ValueError("mla_rotary: the channels of a row must be contiguous")
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return q
    half = cos.shape[1]
    heads = min(16, triton.next_power_of_2(num_heads))
    tokens = 1 if num_tokens <= 64 else max(1, _ROWS // heads)
    _mla_rotary_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(num_heads, heads) + 1)](
        q,
        latent,
        key,
        weight,
        cos,
        sin,
        slots,
        cache,
        cache_scale,
        num_tokens,
        num_heads,
        eps,
        q.stride(0),
        q.stride(1),
        latent.stride(0),
        key.stride(0),
        cos.stride(0),
        cache.stride(0),
        PLAIN_DIM=head_dim - 2 * half,
        LATENT_DIM=latent.shape[1],
        HALF=half,
        INTERLEAVED=interleaved,
        TOKENS=tokens,
        HEADS=heads,
        HALF_BLOCK=triton.next_power_of_2(half),
        LATENT_BLOCK=triton.next_power_of_2(latent.shape[1]),
        HAS_SCALE=cache_scale is not None,
        num_warps=4,
        **overlapping(q),
    )
    return q


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _mla_rotary_kernel(
    q,
    latent,
    key,
    weight,
    cos,
    sin,
    slots,
    cache,
    cache_scale,
    num_tokens,
    num_heads,
    eps,
    token_stride,
    head_stride,
    latent_stride,
    key_stride,
    angle_stride,
    slot_stride,
    PLAIN_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    first, block = tl.program_id(0) * TOKENS, tl.program_id(1)
    if block < tl.num_programs(1) - 1:
        _turn_queries(
            q, cos, sin, weight, eps, first, block * HEADS, num_tokens, num_heads, token_stride, head_stride,
            angle_stride, PLAIN_DIM, HALF, INTERLEAVED, TOKENS, HEADS, HALF_BLOCK,
        )  # fmt: skip
    else:
        _write_rows(
            latent, key, weight, cos, sin, slots, cache, cache_scale, eps, first, num_tokens, latent_stride,
            key_stride, angle_stride, slot_stride, LATENT_DIM, HALF, INTERLEAVED, TOKENS, HALF_BLOCK, LATENT_BLOCK,
            HAS_SCALE,
        )  # fmt: skip


@triton.jit
def _turn_queries(
    q,
    cos,
    sin,
    weight,
    eps,
    first_token,
    first_head,
    num_tokens,
    num_heads,
    token_stride,
    head_stride,
    angle_stride,
    PLAIN_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    row = tl.arange(0, TOKENS * HEADS)
    token, head = first_token + row // HEADS, first_head + row % HEADS
    kept = (token < num_tokens) & (head < num_heads)
    at = q + token.to(tl.int64) * token_stride + head * head_stride + PLAIN_DIM
    turn_rows(
        at, at, kept, kept, cos, sin, token * angle_stride, weight, eps,
        2 * HALF, HALF, INTERLEAVED, False, HALF_BLOCK, 0,
    )  # fmt: skip


@triton.jit
def _write_rows(
    latent,
    key,
    weight,
    cos,
    sin,
    slots,
    cache,
    cache_scale,
    eps,
    first_token,
    num_tokens,
    latent_stride,
    key_stride,
    angle_stride,
    slot_stride,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    token = first_token + tl.arange(0, TOKENS)
    kept = token < num_tokens
    slot = tl.load(slots + token, mask=kept, other=-1)
    written = kept & (slot >= 0)
    target = cache + slot.to(tl.int64) * slot_stride
    wide_token = token.to(tl.int64)
    channel = tl.arange(0, LATENT_BLOCK)
    inside = kept[:, None] & (channel < LATENT_DIM)[None, :]
    x = tl.load(latent + wide_token[:, None] * latent_stride + channel[None, :], mask=inside, other=0.0)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / LATENT_DIM + eps)[:, None]
    by = tl.load(weight + channel, mask=channel < LATENT_DIM, other=0.0).to(tl.float32)
    normed = (wide * factor * by[None, :]).to(x.dtype)
    inside = inside & written[:, None]
    if HAS_SCALE:
        inverse = tl.div_rn(1.0, tl.load(cache_scale))
        tl.store(target[:, None] + channel[None, :], to_e4m3(normed.to(tl.float32) * inverse), mask=inside)
        _write_narrow_keys(
            key + wide_token * key_stride, target + LATENT_DIM, written, cos, sin, token * angle_stride, inverse,
            HALF, INTERLEAVED, HALF_BLOCK,
        )  # fmt: skip
    else:
        tl.store(target[:, None] + channel[None, :], normed, mask=inside)
        turn_rows(
            key + wide_token * key_stride, target + LATENT_DIM, kept, written, cos, sin, token * angle_stride, weight,
            eps, 2 * HALF, HALF, INTERLEAVED, False, HALF_BLOCK, 0,
        )  # fmt: skip


@triton.jit
def _write_narrow_keys(
    source,
    target,
    written,
    cos,
    sin,
    angle_at,
    inverse,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Keys turned, rounded to their own dtype and then to E4M3."""
    pair = tl.arange(0, HALF_BLOCK)
    low_channel = (2 * pair if INTERLEAVED else pair)[None, :]
    high_channel = low_channel + (1 if INTERLEAVED else HALF)
    inside = written[:, None] & (pair < HALF)[None, :]
    low = tl.load(source[:, None] + low_channel, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + high_channel, mask=inside, other=0.0).to(tl.float32)
    angle = angle_at[:, None] + pair[None, :]
    cosine = tl.load(cos + angle, mask=inside, other=0.0)
    sine = tl.load(sin + angle, mask=inside, other=0.0)
    dtype: tl.constexpr = source.dtype.element_ty
    turned_low = (low * cosine - high * sine).to(dtype).to(tl.float32)
    turned_high = (high * cosine + low * sine).to(dtype).to(tl.float32)
    tl.store(target[:, None] + low_channel, to_e4m3(turned_low * inverse), mask=inside)
    tl.store(target[:, None] + high_channel, to_e4m3(turned_high * inverse), mask=inside)
