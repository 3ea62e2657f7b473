"""Attention over paged keys and values in Triton; the contract stands in kernels/paged_attention.py.

Sequences of one query (decodes, and last tokens of prompts) are one launch: a program takes the query heads of one KV
head and a split of the sequence's keys (see attention_splits). All others are another: a program takes a tile of
queries times the query heads of one KV head as rows of its matrices (see attention_tiles). Either way a key is read
once for all query heads that share it. Softmax weights are rounded to the dtype of the values before the second
product.

T tokens, N query heads, K KV heads, G = N / K, H head dim.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.triton.attention_splits import SplitResults, choose_num_splits, count_queries, split_length
from dist_infer.kernels.triton.attention_tiles import plan_tiles

LOG2_E = 1.4426950408889634
# Parts of one buffer, aligned differently in each step: no reason to compile another variant.
STEP_TENSORS = ["query_start", "kv_lens", "page_table"]


def plan_paged_attention(
    step: PagedStep, *, num_kv_heads: int, scale: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See `dist_infer.kernels.paged_attention.plan_paged_attention`."""
    query_lens = np.diff(step.host_query_start)
    has_single, longer = bool((query_lens == 1).any()), np.flatnonzero(query_lens > 1)
    tiles_of = cache(lambda queries: plan_tiles(step, queries, longer))  # the same for all layers

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if len(q) == 0:
            return out
        q = q if q.stride(2) == 1 else q.contiguous()
        group = q.shape[1] // num_kv_heads
        if has_single:
            _attend_single(step, q, k_cache, v_cache, out, group, scale)
        if len(longer):
            rows, keys, warps, stages = _tile_shape(q)
            rows = max(rows, triton.next_power_of_2(group))
            tiles = tiles_of(rows // group)
            dim = max(16, triton.next_power_of_2(q.shape[2]))
            _tiles_kernel[(num_kv_heads * len(tiles),)](
                q,
                k_cache,
                v_cache,
                out,
                tiles,
                step.query_start,
                step.kv_lens,
                step.page_table,
                scale * LOG2_E,
                q.stride(0),
                q.stride(1),
                step.page_table.stride(0),
                k_cache.stride(0),
                k_cache.stride(1),
                num_kv_heads,
                GROUP=group,
                HEAD_DIM=q.shape[2],
                BLOCK_SIZE=step.block_size,
                ROWS=rows,
                DIM=dim,
                KEYS=keys,
                num_warps=warps,
                num_stages=stages,
            )
        return out

    return attend


def _attend_single(
    step: PagedStep, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, group: int, scale: float
) -> None:
    num_kv_heads, head_dim = k_cache.shape[1:]
    dim = max(16, triton.next_power_of_2(head_dim))
    keys = 32 if q.dtype == torch.float32 or dim > 128 else 64
    num_splits = choose_num_splits(
        step.num_seqs * num_kv_heads, int(step.host_kv_lens.max()), keys, q.device, per_processor=2
    )
    results = SplitResults(q, step.num_seqs, q.shape[1], num_splits, head_dim)
    _single_kernel[(num_kv_heads, num_splits, step.num_seqs)](
        q,
        k_cache,
        v_cache,
        out,
        results.total,
        results.largest,
        results.weight_sum,
        step.query_start,
        step.kv_lens,
        step.page_table,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        step.page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        num_splits,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=step.block_size,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        KEYS=keys,
        num_warps=4,
        num_stages=3,
    )
    results.merge(out, step.query_start, step.kv_lens, keys)


def _tile_shape(q: Tensor) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages of a tile."""
    if q.dtype == torch.float32:
        return 32, 32, 4, 2
    return 128, 64, 8, 2 if q.shape[2] > 128 else 5


@triton.jit
def key_slots(table, key, num_keys, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Flat slots of keys of one sequence; a key beyond `num_keys` gives a slot that must not be read."""
    if MASKED:
        page = tl.load(table + key // BLOCK_SIZE, mask=key < num_keys, other=0)
    else:
        page = tl.load(table + key // BLOCK_SIZE)
    return page.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def load_rows(base, rows, row_stride, inside, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """[rows, DIM], zeros where a row is not `inside` and beyond HEAD_DIM channels."""
    dim = tl.arange(0, DIM)
    at = base + rows[:, None] * row_stride + dim[None, :]
    if DIM > HEAD_DIM:
        return tl.load(at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def update_softmax(products, scale, row_max, row_sum):
    """(weights, factor of what was summed before, maximum, sum) after these products, whose scores are in base 2."""
    new_max = tl.maximum(row_max, tl.max(products, 1) * scale)
    factor = tl.exp2(row_max - new_max)
    weights = tl.exp2(products * scale - new_max[:, None])  # one fused operation, so scores are not rounded
    return weights, factor, new_max, row_sum * factor + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["table_stride", "num_splits"], do_not_specialize_on_alignment=STEP_TENSORS)
def _single_kernel(
    q,
    k_cache,
    v_cache,
    out,
    split_total,
    split_largest,
    split_weight_sum,
    query_start,
    kv_lens,
    page_table,
    scale,
    q_token_stride,
    q_head_stride,
    table_stride,
    slot_stride,
    kv_head_stride,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + seq)
    length = split_length(kv_len, num_splits, KEYS)
    begin = split * length
    if ((begin >= kv_len) & (split > 0)) | (count_queries(query_start, seq) != 1):
        return
    end = tl.minimum(begin + length, kv_len)
    token = tl.load(query_start + seq).to(tl.int64)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = kv_head * GROUP + row
    queries = load_rows(q + token * q_token_stride, head, q_head_stride, row < GROUP, HEAD_DIM, DIM, True)
    table = page_table + seq.to(tl.int64) * table_stride
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        slot = key_slots(table, key, end, BLOCK_SIZE, True)
        keys = load_rows(k_cache + kv_head * kv_head_stride, slot, slot_stride, inside, HEAD_DIM, DIM, True)
        values = load_rows(v_cache + kv_head * kv_head_stride, slot, slot_stride, inside, HEAD_DIM, DIM, True)
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        products = tl.where(inside[None, :], products, -float("inf"))
        weights, factor, row_max, row_sum = update_softmax(products, scale, row_max, row_sum)
        total = tl.dot(weights.to(values.dtype), values, total * factor[:, None], input_precision="ieee")
    written = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    num_heads = tl.num_programs(0) * GROUP
    if kv_len <= length:
        result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        at = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=written)
    else:
        part = (seq.to(tl.int64) * num_heads + head) * num_splits + split
        tl.store(split_total + part[:, None] * HEAD_DIM + dim[None, :], total, mask=written)
        tl.store(split_largest + part, row_max, mask=row < GROUP)
        tl.store(split_weight_sum + part, row_sum, mask=row < GROUP)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=STEP_TENSORS)
def _tiles_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tiles,
    query_start,
    kv_lens,
    page_table,
    scale,
    q_token_stride,
    q_head_stride,
    table_stride,
    slot_stride,
    kv_head_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head, tile = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    seq, first = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
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
    num_shared = (
        tl.maximum(tl.minimum(num_keys, kv_len - num_queries + first + 1), 0) // KEYS * KEYS
    )  # by all, in blocks
    table = page_table + seq.to(tl.int64) * table_stride
    k_base, v_base = k_cache + kv_head * kv_head_stride, v_cache + kv_head * kv_head_stride
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(0, num_shared, KEYS):
        total, row_max, row_sum = _add_keys(
            queries, k_base, v_base, table, start, num_keys, last_key, scale, slot_stride, total, row_max, row_sum,
            HEAD_DIM, BLOCK_SIZE, DIM, KEYS, False,
        )  # fmt: skip
    for start in tl.range(num_shared, num_keys, KEYS):
        total, row_max, row_sum = _add_keys(
            queries, k_base, v_base, table, start, num_keys, last_key, scale, slot_stride, total, row_max, row_sum,
            HEAD_DIM, BLOCK_SIZE, DIM, KEYS, True,
        )  # fmt: skip
    result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    num_heads = num_kv_heads * GROUP
    at = ((token + query).to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=kept[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def _add_keys(
    queries,
    k_base,
    v_base,
    table,
    start,
    num_keys,
    last_key,
    scale,
    slot_stride,
    total,
    row_max,
    row_sum,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    key = start + tl.arange(0, KEYS)
    slot = key_slots(table, key, num_keys, BLOCK_SIZE, MASKED)
    keys = load_rows(k_base, slot, slot_stride, key < num_keys, HEAD_DIM, DIM, MASKED)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if MASKED:
        products = tl.where(key[None, :] <= last_key[:, None], products, -float("inf"))
    weights, factor, row_max, row_sum = update_softmax(products, scale, row_max, row_sum)
    values = load_rows(v_base, slot, slot_stride, key < num_keys, HEAD_DIM, DIM, MASKED)
    total = tl.dot(weights.to(values.dtype), values, total * factor[:, None], input_precision="ieee")
    return total, row_max, row_sum
