"""Logits of a router in Triton; the contract stands in kernels/router_gemm.py.

T tokens, D hidden, E experts. A few tokens: a program holds the weights of an expert in its registers, asked for before
the tokens are there, and goes over some tokens. More tokens: a program takes some tokens and some experts. Both use
plain float32 arithmetic on activations that are widened in registers; each thread adds up its channels in order, then
the threads' sums are added in a fixed tree, in float64 where there is one token. Many tokens: the library's float32
product, in pieces.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.dependent_launch import may_read_early, overlapping, wait_for_inputs

_PIECE = 2048  # tokens that are widened together


class HeldTile(NamedTuple):
    """For up to `max_tokens`: tokens that a program takes at a time, how often, and channels of a load."""

    max_tokens: int
    tokens: int
    turns: int
    depth: int
    num_warps: int


class Tile(NamedTuple):
    """Of one program, for up to so many tokens in all."""

    max_tokens: int
    tokens: int
    experts: int
    depth: int
    num_warps: int


# Measured on an H200, like the largest product that is not left to the library.
HELD_TILES = (
    HeldTile(1, 1, 1, 1024, 8),
    HeldTile(2, 2, 1, 1024, 8),
    HeldTile(4, 4, 1, 1024, 8),
    HeldTile(16, 8, 1, 1024, 4),
    HeldTile(32, 8, 2, 2048, 8),
    HeldTile(64, 8, 4, 2048, 8),
)
TILES = (Tile(64, 8, 4, 512, 4), Tile(2048, 8, 4, 256, 4))
_NARROW = 4096  # channels up to which more programs pay, each with one turn
_MAX_HELD = 8192  # channels
_MAX_PRODUCTS = 60_000_000


def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """See `dist_infer.kernels.router_gemm.router_gemm`; float32 weights alone."""
    if weight.dtype != torch.float32:
        raise ValueError(f"router_gemm: the Triton kernel takes float32 weights, not {weight.dtype}")
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, len(weight), dtype=torch.float32, device=x.device)
    if x.numel() * len(weight) > _MAX_PRODUCTS or num_tokens > TILES[-1].max_tokens:
        for piece, part in zip(x.split(_PIECE), out.split(_PIECE), strict=True):
            torch.mm(piece.float(), weight.T, out=part)
    elif out.numel() and num_tokens <= HELD_TILES[-1].max_tokens and 0 < width <= _MAX_HELD:
        held = next(tile for tile in HELD_TILES if num_tokens <= tile.max_tokens)
        run_held(x.contiguous(), weight.contiguous(), out, held)
    elif out.numel():
        tile = next(tile for tile in TILES if num_tokens <= tile.max_tokens)
        run_tile(x.contiguous(), weight.contiguous(), out, tile)
    return out


def run_held(x: Tensor, weight: Tensor, out: Tensor, tile: HeldTile) -> None:
    """Fill `out`, which is not empty."""
    num_tokens, width = x.shape
    turns = tile.turns if width > _NARROW else 1
    _held_kernel[(len(weight), triton.cdiv(num_tokens, tile.tokens * turns))](
        x,
        weight,
        out,
        num_tokens,
        NUM_EXPERTS=len(weight),
        WIDTH=width,
        TOKENS=tile.tokens,
        TURNS=turns,
        DEPTH=min(tile.depth, triton.next_power_of_2(width)),
        EARLY=may_read_early(x),
        num_warps=tile.num_warps,
        **overlapping(x),
    )


def run_tile(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> None:
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
        num_warps=tile.num_warps,
        **overlapping(x),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _held_kernel(
    x,
    weight,
    out,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert = tl.program_id(0)
    CHUNKS: tl.constexpr = (WIDTH + DEPTH - 1) // DEPTH
    if not EARLY:
        wait_for_inputs(OVERLAP)
    held = ()
    for chunk in tl.static_range(CHUNKS):
        column = chunk * DEPTH + tl.arange(0, DEPTH)[None, :]
        part = tl.load(weight + expert * WIDTH + column, mask=column < WIDTH, other=0.0)
        held += (part,)  # type: ignore[assignment]
    if EARLY:
        wait_for_inputs(OVERLAP)
    for turn in tl.range(TURNS):
        token = (tl.program_id(1) * TURNS + turn) * TOKENS + tl.arange(0, TOKENS)
        live = token < num_tokens
        rows = ()
        for chunk in tl.static_range(CHUNKS):
            column = chunk * DEPTH + tl.arange(0, DEPTH)[None, :]
            inside = live[:, None] & (column < WIDTH)
            row = tl.load(x + token[:, None] * WIDTH + column, mask=inside, other=0.0)
            rows += (row,)  # type: ignore[assignment]
        total = rows[0].to(tl.float32) * held[0]  # type: ignore[misc]
        for chunk in tl.static_range(1, CHUNKS):
            total += rows[chunk].to(tl.float32) * held[chunk]
        # A library adds up one row in a tree too, of several each in a chain: one row takes more to be no worse.
        logits = tl.sum(total.to(tl.float64), 1).to(tl.float32) if TOKENS == 1 else tl.sum(total, 1)
        tl.store(out + token * NUM_EXPERTS + expert, logits, mask=live)


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
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, DEPTH)
    x_tile = x + token[:, None] * WIDTH + column[None, :]
    weight_tile = weight + expert[:, None] * WIDTH + column[None, :]
    total = tl.zeros([TOKENS, EXPERTS, DEPTH], tl.float32)
    for k in range(0, WIDTH, DEPTH):
        inside = (k + column < WIDTH)[None, :]
        a = tl.load(x_tile + k, mask=(token < num_tokens)[:, None] & inside, other=0.0).to(tl.float32)
        b = tl.load(weight_tile + k, mask=(expert < NUM_EXPERTS)[:, None] & inside, other=0.0)
        total += a[:, None, :] * b[None, :, :]
    logits = tl.sum(total, 2)
    target = out + token[:, None] * NUM_EXPERTS + expert[None, :]
    tl.store(target, logits, mask=(token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :])
