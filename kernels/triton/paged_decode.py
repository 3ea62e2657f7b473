"""Attention over pages for sequences of one query: decodes, and last tokens of prompts.

A program takes the query heads of one KV head and a split of the sequence's keys (see attention_splits), so each key is
read once for all heads that share it. Of few sequences a program has more keys on the way at a time, of many there are
more programs beside each other on a multiprocessor.

T tokens, N query heads, K KV heads, G = N / K, H head dim, C slots of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.triton.attention_splits import (
    SplitResults,
    choose_num_splits,
    count_queries,
    count_seen,
    num_fixed_splits,
    num_processors,
    split_length,
)
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.paged_rows import (
    LOG2_E,
    STEP_TENSORS,
    key_products,
    key_slots,
    load_rows,
    update_softmax,
)

_FEW_PROGRAMS = 16  # without splits; such few have shorter splits


def attend_single(
    step: PagedStep,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """Fills the rows of `out` that belong to sequences of one query, which sees its last `window` keys.

    `batch_invariant`: all that decides about the order of a sum is the same for any number of sequences.

    Shapes: q [T, N, H], caches [C, K, H], out [T, N, H] contiguous.
    """
    num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    dim = max(16, triton.next_power_of_2(head_dim))
    num_programs = step.num_seqs * num_kv_heads
    few = num_programs <= _FEW_PROGRAMS and not batch_invariant
    small = few or q.dtype == torch.float32 or dim > 128
    keys = 32 if small else 64
    warps, stages = (4, 5) if batch_invariant or num_programs <= 2 * num_processors(q.device) else (2, 3)
    max_kv_len = int(step.host_kv_lens.max())
    max_kv_len = max_kv_len if window is None else min(max_kv_len, window)
    num_splits = (
        num_fixed_splits(max_kv_len)
        if batch_invariant
        else choose_num_splits(num_programs, max_kv_len, keys, q.device, per_processor=2)
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
        WINDOW=window,
        IS_FIXED=batch_invariant,
        num_warps=warps,
        num_stages=stages,
        **overlapping(q),
    )
    results.merge(out, step.query_start, step.kv_lens, keys, window, fixed=batch_invariant)


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
    WINDOW: tl.constexpr,
    IS_FIXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + seq)
    num_seen = count_seen(kv_len, WINDOW)
    length = split_length(num_seen, num_splits, KEYS, IS_FIXED)
    begin = kv_len - num_seen + split * length
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
        slot = key_slots(table, key, end, BLOCK_SIZE)
        keys = load_rows(k_cache + kv_head * kv_head_stride, slot, slot_stride, inside, HEAD_DIM, DIM, True)
        values = load_rows(v_cache + kv_head * kv_head_stride, slot, slot_stride, inside, HEAD_DIM, DIM, True)
        products = key_products(queries, keys)
        products = tl.where(inside[None, :], products, -float("inf"))
        weights, factor, row_max, row_sum = update_softmax(products, scale, row_max, row_sum)
        total = tl.dot(weights.to(values.dtype), values, total * factor[:, None], input_precision="ieee")
    written = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    num_heads = tl.num_programs(0) * GROUP
    if num_seen <= length:
        result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        at = (token * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=written)
    else:
        part = (seq.to(tl.int64) * num_heads + head) * num_splits + split
        tl.store(split_total + part[:, None] * HEAD_DIM + dim[None, :], total, mask=written)
        tl.store(split_largest + part, row_max, mask=row < GROUP)
        tl.store(split_weight_sum + part, row_sum, mask=row < GROUP)
