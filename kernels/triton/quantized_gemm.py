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

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.moe_align import PairBlocks
from dist_infer.kernels.triton.moe_tiles import Tile
from dist_infer.kernels.triton.number_formats import decode_nvfp4, encode_fp8_blocks, ue8m0_value


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
        """The data as a matrix of which the hardware copies tiles; two columns of NVFP4 are one byte."""
        return TensorDescriptor.from_tensor(self.data, [rows, columns // (2 if self.quant_format == "nvfp4" else 1)])


def gate_up(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor, inner: int, blocks: PairBlocks, top_k: int, tile: Tile
) -> Tensor | Fp8Tensor:
    """silu(gate) * up of all pairs in the order of `blocks`, rounded to bfloat16; with FP8 weights quantised after it.

    Shapes: x [R, D], weight [E * 2 * I, D], each expert's gates first -> [P, I]; rows behind those of all blocks are
        not written.
    """
    parts = Parts.of(weight)
    num_blocks, num_pairs, width = blocks.table.shape[1], len(blocks.order), x.shape[1]
    device = parts.data.device
    out: Tensor | Fp8Tensor
    if isinstance(x, Fp8Tensor):
        out = Fp8Tensor.empty(num_pairs, inner, Fp8Scaling.BLOCKS_1X128, device=device)
        targets, sources = (out.data, out.scales), (x.data, x.scales)
    else:
        out = torch.empty(num_pairs, inner, dtype=x.dtype, device=device)
        targets, sources = (out, None), (x, None)  # type: ignore[assignment]
    _gate_up_kernel[(num_blocks * triton.cdiv(inner, tile.block_n),)](
        *sources,
        parts.tiles(tile.block_n, tile.block_k),
        *parts[1:3],
        *blocks[:2],
        *targets,
        num_blocks,
        TOP_K=top_k,
        INNER=inner,
        WIDTH=width,
        FORMAT=parts.quant_format,
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
    num_blocks, num_pairs = blocks.table.shape[1], len(blocks.order)
    out = torch.empty(num_pairs, width, dtype=torch.bfloat16, device=parts.data.device)
    sources = (hidden.data, hidden.scales) if isinstance(hidden, Fp8Tensor) else (hidden, None)
    _down_kernel[(num_blocks * triton.cdiv(width, tile.block_n),)](
        *sources,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK_N
    expert = tl.load(table + block)
    if expert < 0:
        return
    place = tl.load(table + num_blocks + block) + tl.arange(0, BLOCK_M)
    live = place < tl.load(table + 2 * num_blocks + block)
    row = (tl.load(order + place, mask=live, other=0) // TOP_K).to(tl.int64)
    gate_row = expert * (2 * INNER) + n
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        a = _rows(x, row, live, k, WIDTH, BLOCK_K)
        a_scale = _row_scales(x_scales, row, live, k, WIDTH, FORMAT)
        gate = _add_product(gate, a, a_scale, weight, scales, gate_row, INNER - n, k, WIDTH, FORMAT, BLOCK_N, BLOCK_K)
        up = _add_product(
            up, a, a_scale, weight, scales, gate_row + INNER, INNER - n, k, WIDTH, FORMAT, BLOCK_N, BLOCK_K
        )
    if global_scale is not None:
        divisor = tl.load(global_scale)
        gate, up = tl.div_rn(gate, divisor), tl.div_rn(up, divisor)
    hidden = tl.trans((gate * (1.0 / (1.0 + tl.exp(-gate))) * up).to(tl.bfloat16))
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
    TILES: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // TILES
    n = tl.program_id(0) % TILES * BLOCK_N
    expert = tl.load(table + block)
    if expert < 0:
        return
    place = tl.load(table + num_blocks + block) + tl.arange(0, BLOCK_M)
    live = place < tl.load(table + 2 * num_blocks + block)
    row = place.to(tl.int64)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, INNER, BLOCK_K):
        a = _rows(hidden, row, live, k, INNER, BLOCK_K)
        a_scale = _row_scales(hidden_scales, row, live, k, INNER, FORMAT)
        total = _add_product(
            total, a, a_scale, weight, scales, expert * WIDTH + n, WIDTH - n, k, INNER, FORMAT, BLOCK_N, BLOCK_K
        )
    if global_scale is not None:
        total = tl.div_rn(total, tl.load(global_scale))
    pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
    column = n + tl.arange(0, BLOCK_N)
    inside = live[:, None] & (column < WIDTH)[None, :]
    tl.store(out + pair[:, None] * WIDTH + column[None, :], tl.trans(total.to(tl.bfloat16)), mask=inside)


@triton.jit
def _rows(x, row, live, k, DEPTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """[M, K] of rows; zeros for those that aren't live, and behind the last column."""
    column = k + tl.arange(0, BLOCK_K)[None, :]
    inside = live[:, None] if DEPTH % BLOCK_K == 0 else live[:, None] & (column < DEPTH)
    return tl.load(x + row[:, None] * DEPTH + column, mask=inside, other=0.0)


@triton.jit
def _row_scales(scales, row, live, k, DEPTH: tl.constexpr, FORMAT: tl.constexpr):
    """[M] of the 128 columns from k; 1 where rows aren't quantised."""
    return tl.load(scales + row * (DEPTH // 128) + k // 128, mask=live, other=0.0) if FORMAT == "fp8" else 1.0


@triton.jit
def _add_product(
    total,
    a,
    a_scale,
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
    """total + weights a^T, [N, M]; rows of the weight from `rows_left` on give what is not used."""
    if FORMAT == "fp8":
        tl.static_assert(BLOCK_K == 128 and 128 % BLOCK_N == 0)
        scale = tl.load(scales + row.to(tl.int64) // 128 * (DEPTH // 128) + k // 128)
        total += tl.dot(weight.load([row, k]), tl.trans(a)) * (scale * a_scale)[None, :]
    else:
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        block = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)[None, :]
        own = tl.minimum(tl.arange(0, BLOCK_N), rows_left - 1)[:, None]
        at = scales + row.to(tl.int64) * (DEPTH // BLOCK) + own * (DEPTH // BLOCK) + block
        scale = tl.load(at) if DEPTH % BLOCK_K == 0 else tl.load(at, mask=block < DEPTH // BLOCK, other=0)
        if FORMAT == "nvfp4":
            codes = weight.load([row, k // 2])
            values = decode_nvfp4(codes, scale, BLOCK_N, BLOCK_K, tl.bfloat16)
        else:
            codes = tl.reshape(weight.load([row, k]), (BLOCK_N, BLOCK_K // 32, 32))
            values = (codes.to(tl.float32) * ue8m0_value(scale)[:, :, None]).to(tl.bfloat16)
            values = tl.reshape(values, (BLOCK_N, BLOCK_K))
        total = tl.dot(values, tl.trans(a), total)
    return total
