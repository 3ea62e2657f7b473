"""Device code that all attention over pages shares: rows of a cache through a page table, and the running softmax."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
# Parts of one buffer, aligned differently in each step: no reason to compile another variant.
STEP_TENSORS = ["query_start", "kv_lens", "page_table"]


@triton.jit
def key_slots(table, key, num_keys, BLOCK_SIZE: tl.constexpr):
    """Flat slots of keys of one sequence; a key beyond `num_keys` gives a slot that must not be read."""
    page = tl.load(table + key // BLOCK_SIZE, mask=key < num_keys, other=0)
    return page.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE


@triton.jit
def load_rows(base, rows, row_stride, inside, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """[rows, DIM], zeros where a row is not `inside` and beyond HEAD_DIM channels; all are inside if not MASKED."""
    dim = tl.arange(0, DIM)
    at = base + rows[:, None] * row_stride + dim[None, :]
    if DIM > HEAD_DIM:
        return tl.load(at, mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    if MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def key_products(queries, keys):
    """[M, N] of queries [M, D] and keys [N, D], in float32.

    Of float32 channels sixteen are added up in a chain, and then these sums: one chain of all channels has three times
    the error of a library's product of few rows, and it takes more registers.
    """
    if queries.dtype == tl.float32:
        chunks: tl.constexpr = queries.shape[1] // 16
        a = tl.permute(tl.reshape(queries, [queries.shape[0], chunks, 16]), (1, 0, 2))
        b = tl.permute(tl.reshape(keys, [keys.shape[0], chunks, 16]), (1, 2, 0))
        products = tl.sum(tl.dot(a, b, input_precision="ieee"), 0)
    else:
        products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    return products


@triton.jit
def update_softmax(products, scale, row_max, row_sum):
    """(weights, factor of what was summed before, maximum, sum) after these products, whose scores are in base 2."""
    new_max = tl.maximum(row_max, tl.max(products, 1) * scale)
    factor = tl.exp2(row_max - new_max)
    weights = tl.exp2(products * scale - new_max[:, None])  # one fused operation, so scores are not rounded
    return weights, factor, new_max, row_sum * factor + tl.sum(weights, 1)
