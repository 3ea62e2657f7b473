"""Attention over pages for sequences of several queries: prompts, and chunks of prompts with their history.

Keys and values of the sequences are first gathered out of their pages, head by head, each sequence filled up with zeros
to whole blocks; some sequences and some heads at a time, so that what they take is bounded. Then blocks of them are
single loads of the copy engine. That costs 2 % of the attention of a prompt of 8,192 tokens on an H200, where reading
through the page table in every tile costs 40 %. A program takes a tile of queries (see attention_tiles) times the query
heads of one KV head as the rows of its matrices.

T tokens, N query heads, K KV heads, G = N / K, H head dim, C slots of the cache, M gathered keys.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.triton.attention_tiles import plan_tiles, split_sequences, to_device
from dist_infer.kernels.triton.paged_rows import (
    LOG2_E,
    STEP_TENSORS,
    key_products,
    key_slots,
    load_rows,
    update_softmax,
)

_MAX_GATHERED_BYTES = 1 << 28  # of keys and values of several heads; those of one head may take more


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Queries times heads, and keys, of a product; warps of a program."""

    rows: int
    keys: int
    warps: int


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Some sequences whose keys are gathered together."""

    blocks: Tensor  # [M / keys, 2] int32: sequence and first key of each gathered block
    tiles: Tensor  # as of plan_tiles


def tile_shape(dtype: torch.dtype, head_dim: int, group: int) -> TileShape:
    """For G heads of H channels."""
    if dtype == torch.float32:
        return TileShape(rows=max(32, triton.next_power_of_2(group)), keys=32, warps=4)
    warps = 4 if head_dim <= 128 else 8
    return TileShape(rows=max(128, triton.next_power_of_2(group)), keys=64, warps=warps)


def plan_prefill(step: PagedStep, queries: int, keys: int, window: int | None = None) -> list[PrefillPart]:
    """The sequences with several queries, in parts, with tiles of so many queries and blocks of so many keys.

    Keys that are older than the `window` of a sequence's first query are not gathered.

    Stream: the current one; the host waits for nothing.
    """
    parts = []
    query_lens = np.diff(step.host_query_start).astype(np.int64)
    for seqs in split_sequences(step):
        kv_lens = step.host_kv_lens[seqs].astype(np.int64)
        unseen = np.zeros_like(kv_lens) if window is None else kv_lens - query_lens[seqs] + 1 - window
        skipped = np.maximum(unseen, 0) // keys
        counts = -(-kv_lens // keys) - skipped
        first_block = np.cumsum(counts) - counts - skipped  # where the blocks would begin, were none skipped
        key_start = np.zeros(step.num_seqs, np.int64)
        key_start[seqs] = first_block * keys
        block = np.arange(counts.sum()) - np.repeat(first_block, counts)
        blocks = to_device(np.stack([np.repeat(seqs, counts), block * keys], 1), step.kv_lens.device)
        parts.append(PrefillPart(blocks, plan_tiles(step, queries, seqs, key_start)))
    return parts


def attend_tiles(
    step: PagedStep,
    part: PrefillPart,
    shape: TileShape,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
) -> None:
    """Fills the rows of `out` that belong to the part's sequences.

    Shapes: q [T, N, H], caches [C, K, H], out [T, N, H] contiguous.
    """
    num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    num_keys = len(part.blocks) * shape.keys
    dim = max(16, triton.next_power_of_2(head_dim))
    max_heads = max(1, _MAX_GATHERED_BYTES // max(1, 2 * num_keys * dim * q.itemsize))
    for first in range(0, num_kv_heads, max_heads):
        heads = slice(first, min(first + max_heads, num_kv_heads))
        rows = _gather(step, part, shape.keys, k_cache[:, heads], v_cache[:, heads], dim)
        _attend_gathered(
            step,
            part,
            shape,
            q[:, first * group : heads.stop * group],
            rows,
            scale,
            out[:, first * group : heads.stop * group],
            window,
        )


def _gather(step: PagedStep, part: PrefillPart, keys: int, k_cache: Tensor, v_cache: Tensor, dim: int) -> Tensor:
    """[2, K, M, DIM]: keys and values, zeros where there are none."""
    num_heads, head_dim = k_cache.shape[1:]
    rows = torch.empty(2, num_heads, len(part.blocks) * keys, dim, dtype=k_cache.dtype, device=k_cache.device)
    if rows.numel():
        _gather_kernel[(len(part.blocks), num_heads)](
            k_cache,
            v_cache,
            rows,
            part.blocks,
            step.kv_lens,
            step.page_table,
            step.page_table.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            HEAD_DIM=head_dim,
            BLOCK_SIZE=step.block_size,
            DIM=dim,
            KEYS=keys,
            num_warps=4,
        )
    return rows


def _attend_gathered(
    step: PagedStep,
    part: PrefillPart,
    shape: TileShape,
    q: Tensor,
    rows: Tensor,
    scale: float,
    out: Tensor,
    window: int | None,
) -> None:
    _, num_kv_heads, num_keys, dim = rows.shape
    block = [shape.keys, dim]
    empty = rows.new_zeros(shape.keys, dim) if num_keys == 0 else None
    keys, values = (x.view(-1, dim) if empty is None else empty for x in rows)
    _tiles_kernel[(num_kv_heads * len(part.tiles),)](
        q,
        TensorDescriptor.from_tensor(keys, block),
        TensorDescriptor.from_tensor(values, block),
        out,
        part.tiles,
        step.query_start,
        step.kv_lens,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        num_keys,
        num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        HEAD_DIM=q.shape[2],
        ROWS=shape.rows,
        DIM=dim,
        KEYS=shape.keys,
        WINDOW=window,
        num_warps=shape.warps,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["kv_lens", "page_table"])
def _gather_kernel(
    k_cache,
    v_cache,
    rows,
    blocks,
    kv_lens,
    page_table,
    table_stride,
    slot_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    num_heads, num_rows = tl.num_programs(1), tl.num_programs(0).to(tl.int64) * KEYS
    seq = tl.load(blocks + 2 * block).to(tl.int64)
    key = tl.load(blocks + 2 * block + 1) + tl.arange(0, KEYS)
    kv_len = tl.load(kv_lens + seq)
    slot = key_slots(page_table + seq * table_stride, key, kv_len, BLOCK_SIZE)
    keys = load_rows(k_cache + head * head_stride, slot, slot_stride, key < kv_len, HEAD_DIM, DIM, True)
    values = load_rows(v_cache + head * head_stride, slot, slot_stride, key < kv_len, HEAD_DIM, DIM, True)
    row = head * num_rows + block * KEYS + tl.arange(0, KEYS)
    at = row[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(rows + at, keys)
    tl.store(rows + num_heads * num_rows * DIM + at, values)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=STEP_TENSORS[:2])
def _tiles_kernel(
    q,
    k_rows,
    v_rows,
    out,
    tiles,
    query_start,
    kv_lens,
    scale,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    num_rows,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    seq, first, key_start = (tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2))
    token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - token
    kv_len = tl.load(kv_lens + seq)
    QUERIES: tl.constexpr = ROWS // GROUP
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    query = first + row // GROUP
    kept = (row < QUERIES * GROUP) & (query < num_queries)
    head = kv_head * GROUP + row % GROUP
    q_row = (token + query).to(tl.int64) * q_token_stride + head * q_head_stride
    queries = load_rows(q, q_row, 1, kept, HEAD_DIM, DIM, True)
    last_key = kv_len - num_queries + query  # that a row sees
    num_keys = tl.minimum(kv_len, kv_len - num_queries + first + QUERIES)  # that any row sees
    base = kv_head * num_rows + key_start
    # With a window a row may see nothing of its tile's first keys, and needs a number to subtract.
    row_max = tl.full([ROWS], -float("inf") if WINDOW is None else -3.0e38, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    oldest = kv_len - num_queries + first + 1  # for the first row: keys that it sees; with a window, its first key
    if WINDOW is not None:
        oldest -= WINDOW
    begin = tl.maximum(tl.minimum(num_keys, oldest), 0) // KEYS * KEYS
    if WINDOW is None:  # all rows see what is before
        for start in tl.range(0, begin, KEYS):
            total, row_max, row_sum = _add_keys(
                queries, k_rows, v_rows, base, start, last_key, scale, total, row_max, row_sum, KEYS, False, WINDOW
            )
    for start in tl.range(begin, num_keys, KEYS):
        total, row_max, row_sum = _add_keys(
            queries, k_rows, v_rows, base, start, last_key, scale, total, row_max, row_sum, KEYS, True, WINDOW
        )
    result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    at = ((token + query).to(tl.int64) * out_token_stride + head * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=kept[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def _add_keys(
    queries,
    k_rows,
    v_rows,
    base,
    start,
    last_key,
    scale,
    total,
    row_max,
    row_sum,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    keys = k_rows.load([base + start, 0])
    products = key_products(queries, keys)
    if MASKED:
        key = start + tl.arange(0, KEYS)
        if WINDOW is None:
            seen = key[None, :] <= last_key[:, None]
        else:
            seen = (last_key[:, None] - key[None, :]).to(tl.uint32) < WINDOW  # nor is it negative
        products = tl.where(seen, products, -float("inf"))
    weights, factor, row_max, row_sum = update_softmax(products, scale, row_max, row_sum)
    values = v_rows.load([base + start, 0])
    total = tl.dot(weights.to(values.dtype), values, total * factor[:, None], input_precision="ieee")
    return total, row_max, row_sum
