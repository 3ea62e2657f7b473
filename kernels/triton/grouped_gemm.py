"""Matrix products over blocks of pairs (moe_align), each with the weights of its expert, in Triton.

P pairs, K experts a row, E experts, D model, I intermediate channels. A program takes a block of pairs and some output
channels; programs of unused blocks end at once, so that the grid follows from upper bounds. With a tile that splits
tails, a block that is filled by half or by a quarter is computed as one of that size. Accumulation in float32.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.moe_align import PairBlocks, block_of
from dist_infer.kernels.triton.moe_tiles import Tile
from dist_infer.kernels.triton.silu_mul import gated


def gate_up(
    x: Tensor,
    weight: Tensor,
    blocks: PairBlocks,
    top_k: int,
    tile: Tile,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor:
    """silu(gate) * up of all pairs in the order of `blocks`, rounded to the dtype of x. Rows of x are gathered.

    Shapes: x [R, D], weight [E, 2 * I, D], the gates first -> [P, I]; rows behind those of all blocks are not written.
    """
    num_blocks, inner, width = blocks.table.shape[1], weight.shape[1] // 2, weight.shape[2]
    out = x.new_empty(len(blocks.order), inner)
    _gate_up_kernel[(num_blocks * triton.cdiv(inner, tile.block_n),)](
        x,
        *_matrix(weight, tile.block_n, tile.block_k),
        *blocks[:2],
        out,
        num_blocks,
        top_k,
        inner,
        width,
        blocks.block_len,
        *tile.sizes,
        ACTIVATION=activation.value,
        **tile.launch,
        **overlapping(x),
    )
    return out


def down(hidden: Tensor, weight: Tensor, blocks: PairBlocks, tile: Tile) -> Tensor:
    """The output of every pair, rounded to the dtype of `hidden`; pair r K + k stands in that row.

    Shapes: hidden [P, I] in the order of `blocks`, weight [E, D, I] -> [P, D]; rows of pairs in no block are not set.
    """
    num_blocks, width, inner = blocks.table.shape[1], weight.shape[1], weight.shape[2]
    out = hidden.new_empty(len(blocks.order), width)
    _down_kernel[(num_blocks * triton.cdiv(width, tile.block_n),)](
        hidden,
        *(_matrix(hidden[None], blocks.block_len, tile.block_k) if tile.tails else (hidden, False)),
        *_matrix(weight, tile.block_n, tile.block_k),
        *blocks[:2],
        out,
        num_blocks,
        width,
        inner,
        blocks.block_len,
        *tile.sizes,
        **tile.launch,
        **overlapping(hidden),
    )
    return out


def _matrix(weights: Tensor, rows: int, columns: int) -> tuple[Any, bool]:
    """All experts' rows as one matrix: by a descriptor the hardware copies tiles, if its rows are of whole 16 bytes."""
    if weights.shape[2] * weights.element_size() % 16 or weights.data_ptr() % 16:
        return weights, False
    return TensorDescriptor.from_tensor(weights.view(-1, weights.shape[2]), [rows, columns]), True


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x,
    weight,
    DESCRIPTOR: tl.constexpr,
    order,
    table,
    out,
    num_blocks,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TAILS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert, start, end, n = block_of(table, num_blocks, INNER, BLOCK_N)
    if expert < 0:
        return
    if TAILS and end - start <= BLOCK_M // 4:
        _gate_up_block(
            x,
            weight,
            DESCRIPTOR,
            order,
            out,
            expert,
            start,
            end,
            n,
            TOP_K,
            INNER,
            WIDTH,
            BLOCK_M // 4,
            BLOCK_N,
            BLOCK_K,
            True,
            ACTIVATION,
        )
    elif TAILS and end - start <= BLOCK_M // 2:
        _gate_up_block(
            x,
            weight,
            DESCRIPTOR,
            order,
            out,
            expert,
            start,
            end,
            n,
            TOP_K,
            INNER,
            WIDTH,
            BLOCK_M // 2,
            BLOCK_N,
            BLOCK_K,
            True,
            ACTIVATION,
        )
    else:
        _gate_up_block(
            x,
            weight,
            DESCRIPTOR,
            order,
            out,
            expert,
            start,
            end,
            n,
            TOP_K,
            INNER,
            WIDTH,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            SWAP,
            ACTIVATION,
        )


@triton.jit
def _gate_up_block(
    x,
    weight,
    DESCRIPTOR: tl.constexpr,
    order,
    out,
    expert,
    start,
    end,
    n,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    place = start + tl.arange(0, BLOCK_M)
    live = place < end
    row = tl.load(order + place, mask=live, other=0) // TOP_K
    x_tile = x + row.to(tl.int64)[:, None] * WIDTH
    gate_row = expert * (2 * INNER) + n
    gate = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        a = _row_tile(x_tile, live, k, WIDTH, BLOCK_K)
        gate_tile = _weight_tile(weight, gate_row, INNER - n, k, DESCRIPTOR, WIDTH, BLOCK_N, BLOCK_K)
        up_tile = _weight_tile(weight, gate_row + INNER, INNER - n, k, DESCRIPTOR, WIDTH, BLOCK_N, BLOCK_K)
        gate = _product(a, gate_tile, gate, SWAP)
        up = _product(a, up_tile, up, SWAP)
    hidden = gated(gate, up, ACTIVATION).to(out.dtype.element_ty)
    if SWAP:
        hidden = tl.trans(hidden)
    column = n + tl.arange(0, BLOCK_N)
    target = out + place.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, hidden, mask=live[:, None] & (column < INNER)[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden,
    hidden_matrix,
    HIDDEN_DESCRIPTOR: tl.constexpr,
    weight,
    DESCRIPTOR: tl.constexpr,
    order,
    table,
    out,
    num_blocks,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TAILS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert, start, end, n = block_of(table, num_blocks, WIDTH, BLOCK_N)
    if expert < 0:
        return
    if TAILS and end - start <= BLOCK_M // 4:
        _down_block(
            hidden,
            False,
            weight,
            DESCRIPTOR,
            order,
            out,
            expert,
            start,
            end,
            n,
            WIDTH,
            INNER,
            BLOCK_M // 4,
            BLOCK_N,
            BLOCK_K,
            True,
        )
    elif TAILS and end - start <= BLOCK_M // 2:
        _down_block(
            hidden,
            False,
            weight,
            DESCRIPTOR,
            order,
            out,
            expert,
            start,
            end,
            n,
            WIDTH,
            INNER,
            BLOCK_M // 2,
            BLOCK_N,
            BLOCK_K,
            True,
        )
    else:
        rows = hidden_matrix if HIDDEN_DESCRIPTOR else hidden
        _down_block(
            rows,
            HIDDEN_DESCRIPTOR,
            weight,
            DESCRIPTOR,
            order,
            out,
            expert,
            start,
            end,
            n,
            WIDTH,
            INNER,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            SWAP,
        )


@triton.jit
def _down_block(
    hidden,
    HIDDEN_DESCRIPTOR: tl.constexpr,
    weight,
    DESCRIPTOR: tl.constexpr,
    order,
    out,
    expert,
    start,
    end,
    n,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    place = start + tl.arange(0, BLOCK_M)
    live = place < end
    weight_row = expert * WIDTH + n
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, INNER, BLOCK_K):
        if HIDDEN_DESCRIPTOR:
            a = hidden.load([start, k])
        else:
            a = _row_tile(hidden + place.to(tl.int64)[:, None] * INNER, live, k, INNER, BLOCK_K)
        tile = _weight_tile(weight, weight_row, WIDTH - n, k, DESCRIPTOR, INNER, BLOCK_N, BLOCK_K)
        total = _product(a, tile, total, SWAP)
    outputs = total.to(out.dtype.element_ty)
    if SWAP:
        outputs = tl.trans(outputs)
    pair = tl.load(order + place, mask=live, other=0)
    column = n + tl.arange(0, BLOCK_N)
    target = out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, outputs, mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _row_tile(rows, live, k, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """[M, K] of rows that are given by pointers; zeros for rows that aren't live, and behind the last column."""
    column = k + tl.arange(0, BLOCK_K)[None, :]
    if DEPTH % BLOCK_K == 0:
        tile = tl.load(rows + column, mask=live[:, None], other=0.0)
    else:
        tile = tl.load(rows + column, mask=live[:, None] & (column < DEPTH), other=0.0)
    return tile


@triton.jit
def _weight_tile(
    weight,
    row,
    rows_left,
    k,
    DESCRIPTOR: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, K]; behind the expert's rows come some other rows or zeros, behind the last column zeros."""
    if DESCRIPTOR:
        tile = weight.load([row, k])
    else:
        rows = tl.arange(0, BLOCK_N)[:, None]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        at = weight + row.to(tl.int64) * DEPTH + rows * DEPTH + columns
        tile = tl.load(at, mask=(rows < rows_left) & (columns < DEPTH), other=0.0)
    return tile


@triton.jit
def _product(a, weights, total, SWAP: tl.constexpr):
    """total + a weights^T, or its transpose: with few rows, the weights take the side that has to be long."""
    if SWAP:
        total = tl.dot(weights, tl.trans(a), total, input_precision="ieee")
    else:
        total = tl.dot(a, tl.trans(weights), total, input_precision="ieee")
    return total
