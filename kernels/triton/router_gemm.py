"""Logits of a router in Triton; the contract stands in kernels/router_gemm.py.

T tokens, D hidden, E experts. Few tokens: a program takes some tokens and some experts and the whole sum over D, with
plain float32 arithmetic on activations that are widened in registers; each thread adds up its channels in order, then
the threads' sums are added in a fixed tree. Many tokens: the library's float32 product, in pieces.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

_PIECE = 2048  # tokens that are widened together


class _Tile(NamedTuple):
    """Of one program, for up to so many tokens in all."""

    max_tokens: int
    tokens: int
    experts: int
    depth: int
    num_warps: int
    unroll: int = 1


# Measured on an H200, like the largest product that is not left to the library.
TILES = (
    _Tile(1, 1, 1, 1024, 8, 4),
    _Tile(4, 2, 1, 1024, 4, 4),
    _Tile(32, 8, 2, 1024, 8),
    _Tile(64, 8, 4, 512, 4),
    _Tile(2048, 8, 4, 256, 4),
)
_MAX_PRODUCTS = 60_000_000


def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """See `dist_infer.kernels.router_gemm.router_gemm`; float32 weights alone."""
    if weight.dtype != torch.float32:
        raise ValueError(f"router_gemm: the Triton kernel takes float32 weights, not {weight.dtype}")
    num_tokens = len(x)
    out = torch.empty(num_tokens, len(weight), dtype=torch.float32, device=x.device)
    if x.numel() * len(weight) > _MAX_PRODUCTS or num_tokens > TILES[-1].max_tokens:
        for piece, part in zip(x.split(_PIECE), out.split(_PIECE), strict=True):
            torch.mm(piece.float(), weight.T, out=part)
    elif out.numel():
        run_tile(
            x.contiguous(), weight.contiguous(), out, next(tile for tile in TILES if num_tokens <= tile.max_tokens)
        )
    return out


def run_tile(x: Tensor, weight: Tensor, out: Tensor, tile: _Tile) -> None:
    """Fill `out`, which is not empty."""
    num_tokens, width = x.shape
    grid = (triton.cdiv(len(weight), tile.experts), triton.cdiv(num_tokens, tile.tokens))
    _router_kernel[grid](
        x,
        weight,
        out,
        num_tokens,
        NUM_EXPERTS=len(weight),
        WIDTH=width,
        TOKENS=tile.tokens,
        EXPERTS=tile.experts,
        DEPTH=min(tile.depth, triton.next_power_of_2(width)),
        UNROLL=tile.unroll,
        num_warps=tile.num_warps,
        **overlapping(x),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _router_kernel(
    x,
    weight,
    out,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, DEPTH)
    x_tile = x + token[:, None] * WIDTH + column[None, :]
    weight_tile = weight + expert[:, None] * WIDTH + column[None, :]
    total = tl.zeros([TOKENS, EXPERTS, DEPTH], tl.float32)
    for k in tl.range(0, WIDTH, DEPTH, loop_unroll_factor=UNROLL):
        inside = (k + column < WIDTH)[None, :]
        a = tl.load(x_tile + k, mask=(token < num_tokens)[:, None] & inside, other=0.0).to(tl.float32)
        b = tl.load(weight_tile + k, mask=(expert < NUM_EXPERTS)[:, None] & inside, other=0.0)
        total += a[:, None, :] * b[None, :, :]
    logits = tl.sum(total, 2)
    target = out + token[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(target, logits, mask=(token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])
