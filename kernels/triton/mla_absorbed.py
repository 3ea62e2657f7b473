"""Latent attention of one query a sequence, with kv_b folded into the query and applied to the result.

All heads share the cached rows, so a program takes up to 64 heads and a split of a sequence's rows (see
attention_splits), and reads each row once. Its products are transposed: rows are what the matrix instructions have 64
of, heads what they have as few as 16 of. The folded query and the attended latent are rounded to the dtype of the
query, as are the softmax weights.

S sequences with one query each, N heads, L latent, R rotated, P plain and V value channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep, QuantizedTensor
from dist_infer.kernels.triton.attention_splits import (
    SplitResults,
    choose_num_splits,
    num_fixed_splits,
    num_processors,
    split_length,
)
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.mla_heads import apply_values, fold_queries
from dist_infer.kernels.triton.paged_rows import LOG2_E, key_slots, load_rows


def attend_absorbed(
    step: PagedStep,
    q: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    scale: float,
    out: Tensor,
    cache_scale: Tensor | None,
    *,
    batch_invariant: bool = False,
    quantized: QuantizedTensor | None = None,
) -> None:
    """Fills `out`, or `quantized` if given, for a step in which each sequence has one query.

    Shapes: q [S, N, P + R], cache [C, L + R], kv_b [N, P + V, L], out [S, N, V] contiguous, quantized (S, N * V).
    """
    num_seqs, num_heads, _ = q.shape
    latent_dim = kv_b.shape[2]
    plain_dim = kv_b.shape[1] - out.shape[2]
    rotated_dim = q.shape[2] - plain_dim
    folded = fold_queries(q, kv_b, out.shape[2], one_way=batch_invariant)
    latents = torch.empty(num_seqs, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    narrow = cache_scale is not None  # rows are held twice, as they are and widened
    heads = min(32 if narrow else 64, max(16, triton.next_power_of_2(num_heads)))
    num_head_blocks = triton.cdiv(num_heads, heads)
    num_programs = num_seqs * num_head_blocks
    # Two small programs on a multiprocessor, or one large one: of 64 heads, or where there are enough without splits.
    small = heads == 16 and not narrow and not batch_invariant and 3 * num_programs <= 2 * num_processors(q.device)
    keys = 16 if q.dtype == torch.float32 else 32 if small or narrow else 64
    max_kv_len = int(step.host_kv_lens.max())
    num_splits = (
        num_fixed_splits(max_kv_len)
        if batch_invariant
        else choose_num_splits(num_programs, max_kv_len, keys, q.device, per_processor=2 if small else 1)
    )
    results = SplitResults(q, num_seqs, num_heads, num_splits, latent_dim)
    _absorbed_kernel[(num_head_blocks, num_splits, num_seqs)](
        folded,
        cache,
        latents,
        results.total,
        results.largest,
        results.weight_sum,
        step.kv_lens,
        step.page_table,
        cache_scale,
        scale * LOG2_E,
        num_heads,
        folded.stride(0),
        folded.stride(1),
        step.page_table.stride(0),
        cache.stride(0),
        num_splits,
        ROTATED_DIM=rotated_dim,
        LATENT_DIM=latent_dim,
        BLOCK_SIZE=step.block_size,
        HEADS=heads,
        KEYS=keys,
        ROTATED_BLOCK=max(16, triton.next_power_of_2(rotated_dim)),
        LATENT_BLOCK=max(64, triton.next_power_of_2(latent_dim)),
        HAS_SCALE=narrow,
        IS_FIXED=batch_invariant,
        num_warps=4 if heads == 16 and not narrow else 8,
        num_stages=5 if small else 3,  # two for each block of rows on its way, page ids before their rows
        **overlapping(q),
    )
    results.merge(latents, step.query_start, step.kv_lens, keys, fixed=batch_invariant)
    apply_values(latents, kv_b, out, one_way=batch_invariant, quantized=quantized)


@triton.jit(
    do_not_specialize=["table_stride", "num_splits"],
    do_not_specialize_on_alignment=["kv_lens", "page_table"],
)
def _absorbed_kernel(
    folded,
    cache,
    out,
    split_total,
    split_largest,
    split_weight_sum,
    kv_lens,
    page_table,
    cache_scale,
    scale,
    num_heads,
    seq_stride,
    head_stride,
    table_stride,
    slot_stride,
    num_splits,
    ROTATED_DIM: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ROTATED_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IS_FIXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    split, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens + seq)
    length = split_length(kv_len, num_splits, KEYS, IS_FIXED)
    begin = split * length
    if (begin >= kv_len) & (split > 0):
        return
    end = tl.minimum(begin + length, kv_len)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_heads
    channel = tl.arange(0, LATENT_BLOCK)
    queries = folded + seq * seq_stride
    q_folded = load_rows(queries, head, head_stride, is_head, LATENT_DIM, LATENT_BLOCK, True)
    q_rotated = load_rows(queries + LATENT_DIM, head, head_stride, is_head, ROTATED_DIM, ROTATED_BLOCK, True)
    if HAS_SCALE:  # of E4M3, which widens exactly
        value_scale = tl.load(cache_scale)
        scale = scale * value_scale
    table = page_table + seq * table_stride
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    weight_sum = tl.zeros([HEADS], tl.float32)
    total = tl.zeros([LATENT_BLOCK, HEADS], tl.float32)
    for start in tl.range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        slot = key_slots(table, key, end, BLOCK_SIZE)
        latent = load_rows(cache, slot, slot_stride, inside, LATENT_DIM, LATENT_BLOCK, True)
        rotated = load_rows(cache + LATENT_DIM, slot, slot_stride, inside, ROTATED_DIM, ROTATED_BLOCK, True)
        if HAS_SCALE:
            latent, rotated = latent.to(q_folded.dtype), rotated.to(q_folded.dtype)
        products = tl.dot(latent, tl.trans(q_folded), input_precision="ieee")
        products = tl.dot(rotated, tl.trans(q_rotated), products, input_precision="ieee")
        products = tl.where(inside[:, None], products, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(products, 0) * scale)
        factor = tl.exp2(largest - new_largest)
        weights = tl.exp2(products * scale - new_largest[None, :])
        weight_sum = weight_sum * factor + tl.sum(weights, 0)
        largest = new_largest
        total = tl.dot(tl.trans(latent), weights.to(latent.dtype), total * factor[None, :], input_precision="ieee")
    if HAS_SCALE:
        total = total * value_scale
    written = is_head[None, :] & (channel < LATENT_DIM)[:, None]
    row = seq * num_heads + head
    if kv_len <= length:
        result = total / tl.where(weight_sum == 0, 1.0, weight_sum)[None, :]
        tl.store(out + row[None, :] * LATENT_DIM + channel[:, None], result.to(out.dtype.element_ty), mask=written)
    else:
        part = row * num_splits + split
        tl.store(split_total + part[None, :] * LATENT_DIM + channel[:, None], total, mask=written)
        tl.store(split_largest + part, largest, mask=is_head)
        tl.store(split_weight_sum + part, weight_sum, mask=is_head)
