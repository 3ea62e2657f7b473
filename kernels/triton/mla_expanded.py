"""Latent attention of many queries, with keys and values of all heads made of the latents first.

The latents of a sequence's whole past are gathered and multiplied by kv_b, some sequences and some heads at a time, so
that what they take is bounded. A program takes a tile of queries (see attention_tiles) of one head. Keys, values and
softmax weights are rounded to the dtype of the query.

T tokens, N heads, L latent, R rotated, P plain and V value channels, M keys of some sequences together.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.triton.attention_tiles import plan_tiles, split_sequences
from dist_infer.kernels.triton.paged_rows import LOG2_E, load_rows, update_softmax

_MAX_EXPANDED_BYTES = 1 << 28  # of keys and values of several heads; those of one head may take more


@dataclass(frozen=True, slots=True)
class ExpandedPart:
    """Some sequences whose keys are made together."""

    slots: Tensor  # [M] int64, of their keys one sequence after another
    tiles: Tensor  # as of plan_tiles


def plan_expanded(step: PagedStep, *, wide: bool, one_by_one: bool = False) -> list[ExpandedPart]:
    """The sequences with several queries, in parts, perhaps each by itself; `wide`: of float32.

    Stream: the current one; the host waits for nothing.
    """
    parts = split_sequences(step)
    if one_by_one:
        parts = [part[idx : idx + 1] for part in parts for idx in range(len(part))]
    return [_plan_part(step, seqs, tile_shape(wide=wide)[0]) for seqs in parts]


def _plan_part(step: PagedStep, seqs: npt.NDArray[np.int64], queries: int) -> ExpandedPart:
    device = step.kv_lens.device
    kv_lens = step.host_kv_lens[seqs].astype(np.int64)
    first = np.cumsum(kv_lens) - kv_lens
    key_start = np.zeros(step.num_seqs, np.int64)
    key_start[seqs] = first
    on_host = torch.from_numpy(np.concatenate([seqs, kv_lens, first]))
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # torch keeps it until the copy is done
    ids, lens, starts = on_host.to(device, non_blocking=True).split(len(seqs))
    num_keys = int(kv_lens.sum())
    seq, start = (torch.repeat_interleave(x, lens, output_size=num_keys) for x in (ids, starts))
    key = torch.arange(num_keys, device=device) - start
    page = step.page_table[seq, key // step.block_size].long()
    slots = page * step.block_size + key % step.block_size
    return ExpandedPart(slots, plan_tiles(step, queries, seqs, key_start))


def attend_expanded(
    step: PagedStep,
    part: ExpandedPart,
    q: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    scale: float,
    out: Tensor,
    cache_scale: Tensor | None,
) -> None:
    """Fills the rows of `out` that belong to the part's sequences.

    Shapes: q [T, N, P + R], cache [C, L + R], kv_b [N, P + V, L], out [T, N, V] contiguous.
    """
    num_heads, expanded_dim, latent_dim = kv_b.shape
    value_dim = out.shape[2]
    rows = _rows(cache, part.slots, cache_scale, q.dtype)
    max_heads = max(1, _MAX_EXPANDED_BYTES // max(1, len(rows) * expanded_dim * q.itemsize))
    for first in range(0, num_heads, max_heads):
        weight = kv_b[first : first + max_heads]
        expanded = torch.mm(rows[:, :latent_dim], weight.reshape(-1, latent_dim).T).view(-1, len(weight), expanded_dim)
        heads = slice(first, first + len(weight))
        _launch(step, part, q[:, heads], expanded, rows[:, latent_dim:], scale, out[:, heads], value_dim)


def _rows(cache: Tensor, slots: Tensor, cache_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if cache_scale is None:
        return cache.index_select(0, slots)
    rows = cache.view(torch.uint8).index_select(0, slots).view(cache.dtype)
    return (rows.float() * cache_scale).to(dtype)


def _launch(
    step: PagedStep,
    part: ExpandedPart,
    q: Tensor,
    expanded: Tensor,
    rotated: Tensor,
    scale: float,
    out: Tensor,
    value_dim: int,
) -> None:
    plain_dim, rotated_dim = expanded.shape[2] - value_dim, rotated.shape[1]
    rows, keys, warps, stages = tile_shape(wide=q.dtype == torch.float32)
    plain_block, rotated_block, value_block = (
        max(16, triton.next_power_of_2(dim)) for dim in (plain_dim, rotated_dim, value_dim)
    )
    _expanded_kernel[(len(part.tiles), q.shape[1])](
        q,
        expanded,
        rotated,
        out,
        part.tiles,
        step.query_start,
        step.kv_lens,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        expanded.stride(0),
        expanded.stride(1),
        rotated.stride(0),
        out.stride(0),
        out.stride(1),
        PLAIN_DIM=plain_dim,
        ROTATED_DIM=rotated_dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        KEYS=keys,
        PLAIN_BLOCK=plain_block,
        ROTATED_BLOCK=rotated_block,
        VALUE_BLOCK=value_block,
        num_warps=warps,
        num_stages=stages,
    )


def tile_shape(*, wide: bool) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages of a tile."""
    return (32, 32, 4, 2) if wide else (128, 64, 8, 2)


@triton.jit(do_not_specialize_on_alignment=["query_start", "kv_lens"])
def _expanded_kernel(
    q,
    expanded,
    rotated,
    out,
    tiles,
    query_start,
    kv_lens,
    scale,
    q_token_stride,
    q_head_stride,
    key_stride,
    head_stride,
    rotated_stride,
    out_token_stride,
    out_head_stride,
    PLAIN_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    ROTATED_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    seq, first, key_start = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - token
    kv_len = tl.load(kv_lens + seq)
    query = first + tl.arange(0, ROWS)
    kept = query < num_queries
    at = (token + query).to(tl.int64)
    q_head = q + head * q_head_stride
    q_plain = load_rows(q_head, at, q_token_stride, kept, PLAIN_DIM, PLAIN_BLOCK, True)
    q_rotated = load_rows(q_head + PLAIN_DIM, at, q_token_stride, kept, ROTATED_DIM, ROTATED_BLOCK, True)
    last_key = kv_len - num_queries + query  # that a row sees
    num_keys = tl.minimum(kv_len, kv_len - num_queries + first + ROWS)  # that any row sees
    num_shared = tl.maximum(tl.minimum(num_keys, kv_len - num_queries + first + 1), 0) // KEYS * KEYS  # by all
    plain_base = expanded + key_start.to(tl.int64) * key_stride + head * head_stride
    rotated_base = rotated + key_start.to(tl.int64) * rotated_stride
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for start in tl.range(0, num_shared, KEYS):
        total, row_max, row_sum = _add_keys(
            q_plain, q_rotated, plain_base, rotated_base, start, num_keys, last_key, scale, key_stride,
            rotated_stride, total, row_max, row_sum, PLAIN_DIM, ROTATED_DIM, VALUE_DIM, KEYS, PLAIN_BLOCK,
            ROTATED_BLOCK, VALUE_BLOCK, False,
        )  # fmt: skip
    for start in tl.range(num_shared, num_keys, KEYS):
        total, row_max, row_sum = _add_keys(
            q_plain, q_rotated, plain_base, rotated_base, start, num_keys, last_key, scale, key_stride,
            rotated_stride, total, row_max, row_sum, PLAIN_DIM, ROTATED_DIM, VALUE_DIM, KEYS, PLAIN_BLOCK,
            ROTATED_BLOCK, VALUE_BLOCK, True,
        )  # fmt: skip
    result = total / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    dim = tl.arange(0, VALUE_BLOCK)
    target = out + at[:, None] * out_token_stride + head * out_head_stride + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=kept[:, None] & (dim < VALUE_DIM)[None, :])


@triton.jit
def _add_keys(
    q_plain,
    q_rotated,
    plain_base,
    rotated_base,
    start,
    num_keys,
    last_key,
    scale,
    key_stride,
    rotated_stride,
    total,
    row_max,
    row_sum,
    PLAIN_DIM: tl.constexpr,
    ROTATED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PLAIN_BLOCK: tl.constexpr,
    ROTATED_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    key = start + tl.arange(0, KEYS)
    at = key.to(tl.int64)
    inside = key < num_keys
    plain = load_rows(plain_base, at, key_stride, inside, PLAIN_DIM, PLAIN_BLOCK, MASKED)
    rotated = load_rows(rotated_base, at, rotated_stride, inside, ROTATED_DIM, ROTATED_BLOCK, MASKED)
    products = tl.dot(q_plain, tl.trans(plain), input_precision="ieee")
    products = tl.dot(q_rotated, tl.trans(rotated), products, input_precision="ieee")
    if MASKED:
        products = tl.where(key[None, :] <= last_key[:, None], products, -float("inf"))
    weights, factor, row_max, row_sum = update_softmax(products, scale, row_max, row_sum)
    values = load_rows(plain_base + PLAIN_DIM, at, key_stride, inside, VALUE_DIM, VALUE_BLOCK, MASKED)
    total = tl.dot(weights.to(values.dtype), values, total * factor[:, None], input_precision="ieee")
    return total, row_max, row_sum
