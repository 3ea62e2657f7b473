"""The experts of few tokens: each pair of a row and an expert by itself, in two Triton launches.

R rows, K experts a row, P = R K pairs, E experts, D model, I intermediate channels. Weights are read once by each pair
that needs them, with plain float32 arithmetic, by as many programs as it takes to keep the memory busy.
"""

import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.moe_tiles import PAIR_DOWN, PAIR_GATE_UP, PairTile
from dist_infer.kernels.triton.silu_mul import gated


def experts_by_pair(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """As `dist_infer.kernels.moe_experts.moe_experts`, for contiguous arguments and no empty dimension."""
    hidden = pair_gate_up(x, expert_ids, w_gate_up, PAIR_GATE_UP, activation)
    return pair_down(hidden, expert_ids, weights, w_down, PAIR_DOWN)


def outputs_by_pair(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """As `dist_infer.kernels.moe_experts.expert_outputs`, for contiguous arguments and no empty dimension."""
    hidden = pair_gate_up(x, expert_ids, w_gate_up, PAIR_GATE_UP, activation)
    return pair_down(hidden, expert_ids, None, w_down, PAIR_DOWN)


def pair_gate_up(
    x: Tensor,
    expert_ids: Tensor,
    w_gate_up: Tensor,
    tile: PairTile,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """silu(gate) * up of all pairs, rounded to the dtype of x; those of no expert are not written.

    Shapes: x [R, D], expert_ids [R, K], w_gate_up [E, 2 * I, D] -> [P, I].
    """
    num_experts, two_inner, width = w_gate_up.shape
    inner = two_inner // 2
    out = x.new_empty(expert_ids.numel(), inner)
    _gate_up_kernel[(expert_ids.numel(), triton.cdiv(inner, tile.rows))](
        x,
        expert_ids,
        w_gate_up,
        out,
        TOP_K=expert_ids.shape[1],
        NUM_EXPERTS=num_experts,
        WIDTH=width,
        INNER=inner,
        ACTIVATION=activation.value,
        ROWS=tile.rows,
        DEPTH=min(tile.depth, triton.next_power_of_2(width)),
        num_warps=tile.num_warps,
        **overlapping(expert_ids),
    )
    return out


def pair_down(hidden: Tensor, expert_ids: Tensor, weights: Tensor | None, w_down: Tensor, tile: PairTile) -> Tensor:
    """The weighted sum of every row's experts; without weights their outputs, of which those of no expert are anything.

    Shapes: hidden [P, I], expert_ids and weights [R, K], w_down [E, D, I] -> [R, D], or [P, D].
    """
    num_rows, top_k = expert_ids.shape
    num_experts, width, inner = w_down.shape
    out = hidden.new_empty(num_rows if weights is not None else num_rows * top_k, width)
    _down_kernel[(num_rows, triton.cdiv(width, tile.rows))](
        hidden,
        expert_ids,
        weights,
        w_down,
        out,
        TOP_K=top_k,
        K_BLOCK=triton.next_power_of_2(top_k),
        NUM_EXPERTS=num_experts,
        WIDTH=width,
        INNER=inner,
        ROWS=tile.rows,
        DEPTH=min(tile.depth, triton.next_power_of_2(inner)),
        num_warps=tile.num_warps,
        **overlapping(expert_ids),
    )
    return out


@triton.jit
def _gate_up_kernel(
    x,
    ids,
    weight,
    out,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """silu(gate) * up of one pair, some channels."""
    wait_for_inputs(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    x += pair // TOP_K * WIDTH
    gates = weight + expert * (2 * INNER * WIDTH) + row[:, None] * WIDTH + column[None, :]
    gate = tl.zeros([ROWS, DEPTH], tl.float32)
    up = tl.zeros([ROWS, DEPTH], tl.float32)
    for k in tl.range(0, WIDTH, DEPTH, loop_unroll_factor=2):
        inside = (row < INNER)[:, None] & (k + column < WIDTH)[None, :]
        a = tl.load(x + k + column, mask=k + column < WIDTH, other=0.0).to(tl.float32)[None, :]
        gate += a * tl.load(gates + k, mask=inside, other=0.0).to(tl.float32)
        up += a * tl.load(gates + INNER * WIDTH + k, mask=inside, other=0.0).to(tl.float32)
    hidden = gated(tl.sum(gate, 1), tl.sum(up, 1), ACTIVATION)
    tl.store(out + pair * INNER + row, hidden.to(out.dtype.element_ty), mask=row < INNER)


@triton.jit
def _down_kernel(
    hidden,
    ids,
    weights,
    weight,
    out,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The weighted sum of a row's experts, some channels: all experts are read at once, then added one by one.

    Without weights they are stored one by one.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, K_BLOCK)
    expert = tl.load(ids + row * TOP_K + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    routed = (expert >= 0) & (expert < NUM_EXPERTS)
    channel = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DEPTH)
    hidden += (row * TOP_K + slot)[:, None] * INNER + column[None, :]
    matrix = tl.where(routed, expert, 0)[:, None, None] * (WIDTH * INNER) + channel[None, :, None] * INNER
    matrix = weight + matrix + column[None, None, :]
    read = routed[:, None, None] & (channel < WIDTH)[None, :, None]
    # The kernel before this one has waited for the ids; weights are read while it still computes the hidden channels.
    first = tl.load(matrix, mask=read & (column < INNER)[None, None, :], other=0.0)
    wait_for_inputs(OVERLAP)
    a = tl.load(hidden, mask=routed[:, None] & (column < INNER)[None, :], other=0.0).to(tl.float32)
    total = a[:, None, :] * first.to(tl.float32)
    for k in range(DEPTH, INNER, DEPTH):
        inside = k + column < INNER
        b = tl.load(matrix + k, mask=read & inside[None, None, :], other=0.0)
        a = tl.load(hidden + k, mask=routed[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += a[:, None, :] * b.to(tl.float32)
    rounded = tl.sum(total, 2).to(out.dtype.element_ty)
    if weights is None:
        pair = row * TOP_K + slot
        written = routed[:, None] & (channel < WIDTH)[None, :]
        tl.store(out + pair[:, None] * WIDTH + channel[None, :], rounded, mask=written)
    else:
        factor = tl.load(weights + row * TOP_K + slot, mask=routed, other=0.0).to(tl.float32)
        output = rounded.to(tl.float32) * factor[:, None]
        result = tl.zeros([ROWS], tl.float32)
        for k in tl.static_range(TOP_K):
            result += tl.sum(tl.where((slot == k)[:, None], output, 0.0), 0)
        tl.store(out + row * WIDTH + channel, result.to(out.dtype.element_ty), mask=channel < WIDTH)
