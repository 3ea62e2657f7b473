"""RMSNorm of heads that several ranks share, and the rotation, in Triton; the contract stands in kernels/qk_norm.py.

A program takes whole tokens. T tokens, N and K query and KV heads of this rank, H head dim.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import QkNorm, Rotation
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.rms_norm import tile_of


@triton.jit
def squares_of(source, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """The sum of squares of WIDTH elements, in an order that TILE and the number of warps settle."""
    channel = tl.arange(0, TILE)
    values = tl.load(source + channel, mask=channel < WIDTH, other=0).to(tl.float32)
    return tl.sum(values * values, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _squares_kernel(
    qkv,
    out,
    num_tokens,
    token_stride,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    COUNTS_KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    source = qkv + token * token_stride
    tl.store(out + token * 2, squares_of(source, Q_WIDTH, Q_TILE))
    squares = 0.0
    if COUNTS_KEYS:
        squares = squares_of(source + Q_WIDTH, K_WIDTH, K_TILE)
    tl.store(out + token * 2 + 1, squares)


@triton.jit
def _factor(squares, num_channels, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, num_channels) + eps))


@triton.jit
def _scaled(x, factor, weights, inside):
    """The norm's output, rounded."""
    weight = tl.load(weights, mask=inside, other=0.0)
    return (x * factor * weight.to(tl.float32)).to(weight.dtype).to(tl.float32)


@triton.jit
def _turn_heads(
    source,
    target,
    is_written,
    factor,
    weight,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """The heads of a token, normed and turned."""
    dtype: tl.constexpr = target.dtype.element_ty
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (pair < HALF)
    low_channel = head * HEAD_DIM + (2 * pair if INTERLEAVED else pair)
    high_channel = low_channel + (1 if INTERLEAVED else HALF)
    low = tl.load(source + low_channel, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + high_channel, mask=inside, other=0.0).to(tl.float32)
    low = _scaled(low, factor, weight + low_channel, inside)
    high = _scaled(high, factor, weight + high_channel, inside)
    cosine = tl.load(cos + pair, mask=pair < HALF, other=0.0)
    sine = tl.load(sin + pair, mask=pair < HALF, other=0.0)
    inside = inside & is_written
    tl.store(target + low_channel, (low * cosine - high * sine).to(dtype), mask=inside)
    tl.store(target + high_channel, (high * cosine + low * sine).to(dtype), mask=inside)
    if REST_BLOCK > 0:
        channel = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        inside = (head < NUM_HEADS) & (channel < HEAD_DIM)
        channel += head * HEAD_DIM
        rest = _scaled(
            tl.load(source + channel, mask=inside, other=0.0).to(tl.float32), factor, weight + channel, inside
        )
        tl.store(target + channel, rest.to(dtype), mask=inside & is_written)


@triton.jit
def finish_token(
    source,
    out,
    token,
    q_squares,
    k_squares,
    q_weight,
    k_weight,
    q_channels,
    k_channels,
    eps,
    cos,
    sin,
    slots,
    k_cache,
    v_cache,
    slot_stride,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Everything of a token behind the sums of squares of all ranks. `source` is its row."""
    cos += token * HALF
    sin += token * HALF
    _turn_heads(
        source, out + token * Q_WIDTH, True, _factor(q_squares, q_channels, eps), q_weight, cos, sin,
        Q_WIDTH // HEAD_DIM, Q_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
    )  # fmt: skip
    slot = tl.load(slots + token)
    k_factor = _factor(k_squares, k_channels, eps)
    _turn_heads(
        source + Q_WIDTH, k_cache + slot * slot_stride, slot >= 0, k_factor, k_weight, cos, sin,
        K_WIDTH // HEAD_DIM, K_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
    )  # fmt: skip
    channel = tl.arange(0, K_TILE)
    inside = channel < K_WIDTH
    values = tl.load(source + Q_WIDTH + K_WIDTH + channel, mask=inside)
    tl.store(v_cache + slot * slot_stride + channel, values, mask=inside & (slot >= 0))


@triton.jit(do_not_specialize=["num_tokens"])
def _norm_kernel(
    qkv,
    squares,
    q_weight,
    k_weight,
    out,
    cos,
    sin,
    slots,
    k_cache,
    v_cache,
    slot_stride,
    num_tokens,
    token_stride,
    q_channels,
    k_channels,
    eps,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    finish_token(
        qkv + token * token_stride, out, token,
        tl.load(squares + token * 2), tl.load(squares + token * 2 + 1),
        q_weight, k_weight, q_channels, k_channels, eps, cos, sin, slots, k_cache, v_cache, slot_stride,
        Q_WIDTH, K_WIDTH, K_TILE, Q_HEADS, K_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
    )  # fmt: skip


def head_squares(qkv: Tensor, num_kv_heads: int, counts_keys: bool) -> Tensor:
    """See `dist_infer.kernels.qk_norm.head_squares`."""
    num_tokens, num_all, head_dim = qkv.shape
    out = torch.empty(num_tokens, 2, dtype=torch.float32, device=qkv.device)
    if num_tokens:
        qkv = _aligned(qkv)
        sizes, num_warps = widths(num_all, num_kv_heads, head_dim)
        _squares_kernel[(num_tokens,)](
            qkv,
            out,
            num_tokens,
            qkv.stride(0),
            **sizes,
            COUNTS_KEYS=counts_keys,
            num_warps=num_warps,
            **overlapping(qkv),
        )
    return out


def norm_rotary(qkv: Tensor, squares: Tensor, norm: QkNorm, rotation: Rotation) -> Tensor:
    """See `dist_infer.kernels.qk_norm.norm_rotary`."""
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = rotation.k_cache.shape[-2]
    out = qkv.new_empty(num_tokens, num_all - 2 * num_kv_heads, head_dim)
    if num_tokens:
        qkv = _aligned(qkv)
        sizes, num_warps = widths(num_all, num_kv_heads, head_dim)
        del sizes["Q_TILE"]
        _norm_kernel[(num_tokens,)](
            qkv,
            squares.contiguous(),
            *arguments(qkv, norm, rotation, out),
            **sizes,
            **head_sizes(num_all, rotation),
            num_warps=num_warps,
            **overlapping(qkv),
        )
    return out


def widths(num_all: int, num_kv_heads: int, head_dim: int) -> tuple[dict[str, int], int]:
    """Widths and tiles of queries and keys, and warps: what settles the order of their sums."""
    q_width, k_width = (num_all - 2 * num_kv_heads) * head_dim, num_kv_heads * head_dim
    tile, num_warps = tile_of(max(q_width, k_width))
    return {
        "Q_WIDTH": q_width,
        "K_WIDTH": k_width,
        "Q_TILE": tile,
        "K_TILE": triton.next_power_of_2(k_width),
    }, num_warps


def head_sizes(num_all: int, rotation: Rotation) -> dict[str, Any]:
    """Constants of what follows the sums."""
    num_kv_heads, head_dim = rotation.k_cache.shape[-2:]
    half = rotation.cos.shape[1]
    return {
        "Q_HEADS": triton.next_power_of_2(num_all - 2 * num_kv_heads),
        "K_HEADS": triton.next_power_of_2(num_kv_heads),
        "HEAD_DIM": head_dim,
        "HALF": half,
        "INTERLEAVED": rotation.interleaved,
        "HALF_BLOCK": triton.next_power_of_2(half),
        "REST_BLOCK": triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
    }


def arguments(qkv: Tensor, norm: QkNorm, rotation: Rotation, out: Tensor) -> tuple[Any, ...]:
    """What the kernels behind the sums are given, from q_weight to eps."""
    return (
        norm.q_weight,
        norm.k_weight,
        out,
        rotation.cos.contiguous(),
        rotation.sin.contiguous(),
        rotation.slots,
        rotation.k_cache,
        rotation.v_cache,
        rotation.k_cache.stride(-3),
        qkv.shape[-3],
        qkv.stride(-3),
        float(norm.num_q_channels),
        float(norm.num_k_channels),
        norm.eps,
    )


def _aligned(qkv: Tensor) -> Tensor:
    """`qkv`, or a copy where its rows are not such that all are loaded in one way."""
    whole = qkv[0].is_contiguous() and qkv.stride(0) * qkv.element_size() % 16 == 0 and qkv.data_ptr() % 16 == 0
    return qkv if whole else qkv.contiguous()
