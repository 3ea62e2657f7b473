"""Matrix products over blocks of pairs (moe_align) with the quantised weights of their experts, in Triton.

P pairs, K experts a row, E experts, D model, I intermediate channels. As grouped_gemm, whose weights aren't quantised:
a program takes a block of pairs and some output channels. FORMAT is "fp8" (128 x 128, rows 1 x 128), "mxfp8" or
"nvfp4". FP8 products of 128 channels are added up in the matrix unit, their sums in float32 registers; the others are
dequantised, which bfloat16 holds exactly.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, GatedActivation, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.moe_align import PairBlocks, block_of
from dist_infer.kernels.triton.moe_tiles import Tile
from dist_infer.kernels.triton.number_formats import encode_fp8_blocks
from dist_infer.kernels.triton.silu_mul import gated
from dist_infer.kernels.triton.weight_tiles import NVFP4_UNIT, in_order, mxfp8_tile, nvfp4_tile


class Parts(NamedTuple):
    """Of a carrier, as kernels take them."""

    data: Tensor
    scales: Tensor
    global_scale: Tensor | None
    quant_format: str

    @classmethod
    def of(cls, carrier: QuantizedTensor) -> "Parts":
        """Whatever its layout is."""
        if isinstance(carrier, Nvfp4Tensor):
            return cls(carrier.data, carrier.scales, carrier.global_scale, "nvfp4")
        return cls(carrier.data, carrier.scales, None, "fp8" if isinstance(carrier, Fp8Tensor) else "mxfp8")

    def tiles(self, rows: int, columns: int) -> Any:
        """The data as the products take it: FP8 by a descriptor, the others' codes in words of 16 bits."""
        if self.quant_format == "fp8":
            return TensorDescriptor.from_tensor(self.data, [rows, columns])
        return self.data.view(torch.int16)


def gate_up(
    x: Tensor | Fp8Tensor,
    weight: QuantizedTensor,
    inner: int,
    blocks: PairBlocks,
    top_k: int,
    tile: Tile,
    activation: GatedActivation = GatedActivation.SILU,
) -> Tensor | Fp8Tensor:
    """silu(gate) * up of all pairs in the order of `blocks`, rounded to bfloat16; with FP8 weights quantised after it.

    Shapes: x [R, D], weight [E * 2 * I, D], each expert's gates first -> [P, I]; rows behind those of all blocks are
        not written.
    """
    parts = Parts.of(weight)
    num_blocks = blocks.table.shape[1]
    out = _hidden(len(blocks.order), inner, parts)
    _gate_up_kernel[(num_blocks * triton.cdiv(inner, tile.block_n),)](
        *_operand(x),
        parts.tiles(tile.block_n, tile.block_k),
        *parts[1:3],
        *blocks[:2],
        *_operand(out),
        num_blocks,
        TOP_K=top_k,
        INNER=inner,
        WIDTH=x.shape[1],
        FORMAT=parts.quant_format,
        ACTIVATION=activation.value,
        BLOCK_M=blocks.block_len,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        **tile.launch,
        **overlapping(parts.data),
    )
    return out


def down(hidden: Tensor | Fp8Tensor, weight: QuantizedTensor, width: int, blocks: PairBlocks, tile: Tile) -> Tensor:
    """The output of every pair, rounded to bfloat16; pair r K + k stands in that row.

    Shapes: hidden [P, I] in the order of `blocks`, weight [E * D, I] -> [P, D]; rows of pairs in no block are not set.
    """
    parts = Parts.of(weight)
    num_blocks = blocks.table.shape[1]
    out = torch.empty(len(blocks.order), width, dtype=torch.bfloat16, device=parts.data.device)
    _down_kernel[(num_blocks * triton.cdiv(width, tile.block_n),)](
        *_operand(hidden),
        parts.tiles(tile.block_n, tile.block_k),
        *parts[1:3],
        *blocks[:2],
        out,
        num_blocks,
        WIDTH=width,
        INNER=hidden.shape[1],
        FORMAT=parts.quant_format,
        BLOCK_M=blocks.block_len,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        **tile.launch,
        **overlapping(parts.data),
    )
    return out


def _hidden(num_pairs: int, inner: int, parts: Parts) -> Tensor | Fp8Tensor:
    device = parts.data.device
    if parts.quant_format == "fp8":
        return Fp8Tensor.empty(num_pairs, inner, Fp8Scaling.BLOCKS_1X128, device=device)
    return torch.empty(num_pairs, inner, dtype=torch.bfloat16, device=device)


def _operand(x: Tensor | Fp8Tensor) -> tuple[Tensor, Tensor | None]:
    """Values and scales."""
    return (x.data, x.scales) if isinstance(x, Fp8Tensor) else (x, None)


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x,
    x_scales,
    weight,
    scales,
    global_scale,
    order,
    table,
    out,
    out_scales,
    num_blocks,
    TOP_K: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert, start, end, n = block_of(table, num_blocks, INNER, BLOCK_N)
    if expert < 0:
        return
    place = start + tl.arange(0, BLOCK_M)
    live = place < end
    row = (tl.load(order + place, mask=live, other=0) // TOP_K).to(tl.int64)
    gate_row = expert * (2 * INNER) + n
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FORMAT == "fp8":
        gate_scale, up_scale = (
            _block_scale(scales, gate_row, 0, WIDTH),
            _block_scale(scales, gate_row + INNER, 0, WIDTH),
        )
        for k in range(0, WIDTH, BLOCK_K):
            following = tl.minimum(k + BLOCK_K, WIDTH - BLOCK_K)
            next_gate = _block_scale(scales, gate_row, following, WIDTH)
            next_up = _block_scale(scales, gate_row + INNER, following, WIDTH)
            a = _rows(x, row, live, k, WIDTH, FORMAT, BLOCK_M, BLOCK_K)
            a_scale = tl.load(x_scales + row * (WIDTH // 128) + k // 128, mask=live, other=0.0)
            gate += tl.dot(weight.load([gate_row, k]), tl.trans(a)) * (gate_scale * a_scale)[None, :]
            up += tl.dot(weight.load([gate_row + INNER, k]), tl.trans(a)) * (up_scale * a_scale)[None, :]
            gate_scale, up_scale = next_gate, next_up
    else:
        for k in range(0, WIDTH, BLOCK_K):
            a = tl.trans(_rows(x, row, live, k, WIDTH, FORMAT, BLOCK_M, BLOCK_K))
            gate_tile = _tile(weight, scales, gate_row, INNER - n, k, WIDTH, FORMAT, BLOCK_N, BLOCK_K)
            up_tile = _tile(weight, scales, gate_row + INNER, INNER - n, k, WIDTH, FORMAT, BLOCK_N, BLOCK_K)
            gate = tl.dot(gate_tile, a, gate)
            up = tl.dot(up_tile, a, up)
    gate, up = _finished(gate, global_scale, FORMAT), _finished(up, global_scale, FORMAT)
    hidden = tl.trans(gated(gate, up, ACTIVATION).to(tl.bfloat16))
    column = n + tl.arange(0, BLOCK_N)
    at = place.to(tl.int64)[:, None] * INNER + column[None, :]
    inside = live[:, None] & (column < INNER)[None, :]
    if FORMAT == "fp8":
        tl.static_assert(BLOCK_N == 128 and INNER % 128 == 0)
        encoded, stored = encode_fp8_blocks(hidden)
        tl.store(out + at, encoded, mask=inside)
        tl.store(out_scales + place.to(tl.int64) * (INNER // 128) + n // 128, stored, mask=live)
    else:
        tl.store(out + at, hidden, mask=inside)


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    hidden,
    hidden_scales,
    weight,
    scales,
    global_scale,
    order,
    table,
    out,
    num_blocks,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert, start, end, n = block_of(table, num_blocks, WIDTH, BLOCK_N)
    if expert < 0:
        return
    place = start + tl.arange(0, BLOCK_M)
    live = place < end
    pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
    row = place.to(tl.int64)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    weight_row = expert * WIDTH + n
    if FORMAT == "fp8":
        scale = _block_scale(scales, weight_row, 0, INNER)
        for k in range(0, INNER, BLOCK_K):
            next_scale = _block_scale(scales, weight_row, tl.minimum(k + BLOCK_K, INNER - BLOCK_K), INNER)
            a = _rows(hidden, row, live, k, INNER, FORMAT, BLOCK_M, BLOCK_K)
            a_scale = tl.load(hidden_scales + row * (INNER // 128) + k // 128, mask=live, other=0.0)
            total += tl.dot(weight.load([weight_row, k]), tl.trans(a)) * (scale * a_scale)[None, :]
            scale = next_scale
    else:
        for k in range(0, INNER, BLOCK_K):
            a = tl.trans(_rows(hidden, row, live, k, INNER, FORMAT, BLOCK_M, BLOCK_K))
            tile = _tile(weight, scales, weight_row, WIDTH - n, k, INNER, FORMAT, BLOCK_N, BLOCK_K)
            total = tl.dot(tile, a, total)
    total = _finished(total, global_scale, FORMAT)
    column = n + tl.arange(0, BLOCK_N)
    inside = live[:, None] & (column < WIDTH)[None, :]
    tl.store(out + pair[:, None] * WIDTH + column[None, :], tl.trans(total.to(tl.bfloat16)), mask=inside)


@triton.jit
def _finished(total, global_scale, FORMAT: tl.constexpr):
    """A product with what its sums leave out."""
    if FORMAT == "nvfp4":
        total *= 1 / NVFP4_UNIT
    if global_scale is not None:
        total = tl.div_rn(total, tl.load(global_scale))
    return total


@triton.jit
def _rows(x, row, live, k, DEPTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """[M, K] of rows, columns as the weight's; zeros for rows that aren't live, and behind the last column."""
    column = k + tl.arange(0, BLOCK_K)[None, :]
    inside = live[:, None] if DEPTH % BLOCK_K == 0 else live[:, None] & (column < DEPTH)
    values = tl.load(x + row[:, None] * DEPTH + column, mask=inside, other=0.0)
    return values if FORMAT == "fp8" else in_order(values, BLOCK_M, BLOCK_K, FORMAT)


@triton.jit
def _block_scale(scales, row, k, DEPTH: tl.constexpr):
    """Of the 128 x 128 weights that begin there: asked for a turn before it is needed, as nothing else hides it."""
    return tl.load(scales + row.to(tl.int64) // 128 * (DEPTH // 128) + k // 128)


@triton.jit
def _tile(
    weight,
    scales,
    row,
    rows_left,
    k,
    DEPTH: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, K] of the weight, dequantised; rows from `rows_left` on give what is not used."""
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    PACKED: tl.constexpr = 4 if FORMAT == "nvfp4" else 2  # codes of a word
    own = row.to(tl.int64) + tl.minimum(tl.arange(0, BLOCK_N), rows_left - 1)[:, None]
    word = k // PACKED + tl.arange(0, BLOCK_K // PACKED)[None, :]
    at = weight + own * (DEPTH // PACKED) + word
    words = tl.load(at) if DEPTH % BLOCK_K == 0 else tl.load(at, mask=word < DEPTH // PACKED, other=0)
    block = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)[None, :]
    if FORMAT == "mxfp8" and DEPTH % (4 * BLOCK) == 0:
        # single bytes are not copied ahead of their use, so each comes with its three neighbours
        at = scales.to(tl.pointer_type(tl.int32)) + own * (DEPTH // (4 * BLOCK)) + block // 4
        fours = tl.load(at) if DEPTH % BLOCK_K == 0 else tl.load(at, mask=block < DEPTH // BLOCK, other=0)
        scale = (fours >> (8 * (block % 4))).to(tl.uint8)
    else:
        at = scales + own * (DEPTH // BLOCK) + block
        scale = tl.load(at) if DEPTH % BLOCK_K == 0 else tl.load(at, mask=block < DEPTH // BLOCK, other=0)
    if FORMAT == "nvfp4":
        values = nvfp4_tile(words, scale, BLOCK_N, BLOCK_K)
    else:
        values = mxfp8_tile(words, scale, BLOCK_N, BLOCK_K)
    return values
