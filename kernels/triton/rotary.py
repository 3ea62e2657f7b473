"""Rotary embedding, QK norm and KV write in one Triton kernel; the contract stands in kernels/rotary.py.

A program takes some heads of some tokens, all of one kind: queries, keys or values. T tokens, N query heads, K KV
heads, H head dim, R rotated channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

_ROWS = 32  # heads of tokens that a program of a large step takes


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    interleaved: bool,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """See `dist_infer.kernels.rotary.rotary`."""
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = k_cache.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    qkv, k_cache, v_cache = (_with_whole_rows(x) for x in (qkv, k_cache, v_cache))
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    half = cos.shape[1]
    heads = min(8, triton.next_power_of_2(num_kv_heads))
    tokens = 1 if num_tokens <= 64 else max(1, _ROWS // heads)
    blocks = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    _rotary_kernel[(triton.cdiv(num_tokens, tokens), blocks)](
        qkv,
        cos,
        sin,
        slots,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        out,
        k_cache,
        v_cache,
        num_tokens,
        num_heads,
        num_kv_heads,
        eps,
        qkv.stride(0),
        cos.stride(0),
        k_cache.stride(0),
        HEAD_DIM=head_dim,
        HALF=half,
        INTERLEAVED=interleaved,
        HAS_NORM=q_weight is not None,
        TOKENS=tokens,
        HEADS=heads,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        num_warps=4 if tokens > 1 else 2,
        **overlapping(qkv),
    )
    return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """The kernel steps over the first dimension only."""
    if x[0:1].is_contiguous():
        return x
    raise ValueError(f"rotary: heads and channels of a token must be contiguous, not of strides {x.stride()}")


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _rotary_kernel(
    qkv,
    cos,
    sin,
    slots,
    q_weight,
    k_weight,
    out,
    k_cache,
    v_cache,
    num_tokens,
    num_heads,
    num_kv_heads,
    eps,
    token_stride,
    angle_stride,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    is_token = token < num_tokens
    wide_token = token.to(tl.int64)
    num_q_blocks = tl.cdiv(num_heads, HEADS)
    num_kv_blocks = tl.cdiv(num_kv_heads, HEADS)
    block = tl.program_id(1)
    angle_at = token * angle_stride
    if block < num_q_blocks:
        head = block * HEADS + row % HEADS
        kept = is_token & (head < num_heads)
        source = qkv + wide_token * token_stride + head * HEAD_DIM
        target = out + (wide_token * num_heads + head) * HEAD_DIM
        turn_rows(
            source, target, kept, kept, cos, sin, angle_at, q_weight, eps,
            HEAD_DIM, HALF, INTERLEAVED, HAS_NORM, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token, mask=is_token, other=-1)
        is_value = block >= num_q_blocks + num_kv_blocks
        head = (block - num_q_blocks - tl.where(is_value, num_kv_blocks, 0)) * HEADS + row % HEADS
        kept = is_token & (head < num_kv_heads)
        written = kept & (slot >= 0)
        to = slot.to(tl.int64) * slot_stride + head * HEAD_DIM
        if is_value:
            source = qkv + wide_token * token_stride + (num_heads + num_kv_heads + head) * HEAD_DIM
            _copy_rows(source, v_cache + to, written, HEAD_DIM, 2 * HALF_BLOCK + REST_BLOCK)
        else:
            source = qkv + wide_token * token_stride + (num_heads + head) * HEAD_DIM
            turn_rows(
                source, k_cache + to, kept, written, cos, sin, angle_at, k_weight, eps,
                HEAD_DIM, HALF, INTERLEAVED, HAS_NORM, HALF_BLOCK, REST_BLOCK,
            )  # fmt: skip


@triton.jit
def _copy_rows(source, target, written, HEAD_DIM: tl.constexpr, AT_LEAST: tl.constexpr):
    channel = tl.arange(0, triton.next_power_of_2(AT_LEAST))[None, :]
    inside = written[:, None] & (channel < HEAD_DIM)
    tl.store(target[:, None] + channel, tl.load(source[:, None] + channel, mask=inside), mask=inside)


@triton.jit
def turn_rows(
    source,
    target,
    kept,
    written,
    cos,
    sin,
    angle_at,
    weight,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Heads at `source` normed, their first 2 * HALF channels turned, and all stored at `target`."""
    pair = tl.arange(0, HALF_BLOCK)
    low_channel = 2 * pair if INTERLEAVED else pair
    high_channel = low_channel + (1 if INTERLEAVED else HALF)
    inside = kept[:, None] & (pair < HALF)[None, :]
    low = tl.load(source[:, None] + low_channel[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + high_channel[None, :], mask=inside, other=0.0).to(tl.float32)
    angle = angle_at[:, None] + pair[None, :]
    cosine = tl.load(cos + angle, mask=inside, other=0.0)
    sine = tl.load(sin + angle, mask=inside, other=0.0)
    if REST_BLOCK > 0:
        rest_channel = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_inside = kept[:, None] & (rest_channel < HEAD_DIM)[None, :]
        rest = tl.load(source[:, None] + rest_channel[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(low * low + high * high, 1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = _scaled(low, factor, weight + low_channel, pair < HALF)
        high = _scaled(high, factor, weight + high_channel, pair < HALF)
        if REST_BLOCK > 0:
            rest = _scaled(rest, factor, weight + rest_channel, rest_channel < HEAD_DIM)
    dtype: tl.constexpr = target.dtype.element_ty
    inside = inside & written[:, None]
    tl.store(target[:, None] + low_channel[None, :], (low * cosine - high * sine).to(dtype), mask=inside)
    tl.store(target[:, None] + high_channel[None, :], (high * cosine + low * sine).to(dtype), mask=inside)
    if REST_BLOCK > 0:
        tl.store(target[:, None] + rest_channel[None, :], rest.to(dtype), mask=rest_inside & written[:, None])


@triton.jit
def _scaled(x, factor, weights, inside):
    """The norm's output, rounded as the op of its own would round it."""
    weight = tl.load(weights, mask=inside, other=0.0)
    return (x * factor * weight.to(tl.float32)[None, :]).to(weight.dtype).to(tl.float32)
