"""Causal attention over paged keys and values in plain torch; the contract stands in kernels/paged_attention.py.

Sequences with one query are batched: those of similar length are gathered into one [S, K, L] block of rows and
multiplied together, so a decode step costs a few calls a layer whatever its size. Longer ones go one by one, in
blocks of queries that bound the size of the scores. Where rows of a block stand for no key they repeat the sequence's
own last key, so that neither stale nor foreign values, not even a NaN, can reach the sum.

S sequences, T tokens, N query heads, K KV heads, G = N / K, H head dim, L keys of a block, Q queries of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep

_MAX_SCORES = 1 << 20  # queries x keys of a block, for each head
_NO_WINDOW = (1 << 31) - 1  # lengths are int32
_SHORT_BITS = 6  # sequences of up to 64 keys are batched together, then by powers of two


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query each."""

    rows: Tensor | None  # [S] token rows; None: they are the whole step in order
    cache_rows: Tensor  # [S * K * L] rows of the cache seen as [C * K, H]
    hidden: Tensor  # [S, 1, L] True where a row stands for no key


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A block of queries of one sequence."""

    start: int  # token rows
    stop: int
    slots: Tensor  # [L]
    hidden: Tensor  # [Q, L] True where a query must not look


def plan_paged_attention(
    step: PagedStep,
    *,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    batch_invariant: bool = False,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See `dist_infer.kernels.paged_attention.plan_paged_attention`."""
    query_lens = np.diff(step.host_query_start)
    active = (query_lens > 0) & (step.host_kv_lens > 0)
    window = window or _NO_WINDOW
    single = active & (query_lens == 1)
    groups = [[seq] for seq in np.flatnonzero(single).tolist()] if batch_invariant else _by_length(step, single)
    decodes = [_plan_decodes(step, seqs, num_kv_heads, window) for seqs in groups]
    chunks = [
        chunk for seq in np.flatnonzero(active & (query_lens > 1)) for chunk in _plan_chunks(step, int(seq), window)
    ]
    all_written = bool(active[query_lens > 0].all())

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not all_written:
            out.zero_()
        for decode in decodes:
            _attend_decodes(decode, q, k_cache, v_cache, scale, out)
        for chunk in chunks:
            _attend_chunk(chunk, q, k_cache, v_cache, scale, out)
        return out

    return attend


def _by_length(step: PagedStep, chosen: npt.NDArray[np.bool_]) -> list[list[int]]:
    """The chosen sequences, those of similar length together."""
    groups: dict[int, list[int]] = {}
    for seq in np.flatnonzero(chosen).tolist():
        bits = (int(step.host_kv_lens[seq]) - 1).bit_length()
        groups.setdefault(max(bits, _SHORT_BITS), []).append(seq)
    return list(groups.values())


def _plan_decodes(step: PagedStep, seqs: list[int], num_kv_heads: int, window: int) -> _Decodes:
    device = step.kv_lens.device
    whole = len(seqs) == step.num_seqs == step.num_tokens
    index = None if whole else torch.tensor(seqs, device=device)
    kv_lens = step.kv_lens if index is None else step.kv_lens.index_select(0, index)
    page_table = step.page_table if index is None else step.page_table.index_select(0, index)
    key = torch.arange(min(int(step.host_kv_lens[seqs].max()), window), device=device)[None]
    key = key + (kv_lens[:, None] - window).clamp_(min=0)
    slots = _slots(page_table, torch.minimum(key, kv_lens[:, None] - 1), step.block_size)
    cache_rows = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads, device=device)[:, None]
    rows = None if index is None else step.query_start.index_select(0, index).long()
    return _Decodes(rows, cache_rows.flatten(), (key >= kv_lens[:, None])[:, None])


def _plan_chunks(step: PagedStep, seq: int, window: int) -> list[_Chunk]:
    device = step.kv_lens.device
    first, last = step.host_query_start[seq : seq + 2].tolist()
    kv_len = int(step.host_kv_lens[seq])
    history = kv_len - (last - first)
    key = torch.arange(kv_len, device=device)
    slots = _slots(step.page_table[seq : seq + 1], key[None], step.block_size)[0]
    block_len = max(1, _MAX_SCORES // kv_len)
    chunks = []
    for start in range(first, last, block_len):
        stop = min(start + block_len, last)
        query = torch.arange(start - first, stop - first, device=device)[:, None]
        seen = slice(max(0, history + start - first + 1 - window), history + stop - first)
        own = history + query
        chunks.append(_Chunk(start, stop, slots[seen], (key[seen] > own) | (key[seen] <= own - window)))
    return chunks


def _slots(page_table: Tensor, keys: Tensor, block_size: int) -> Tensor:
    """[S, L] flat slots of token indices `keys` [S, L]."""
    pages = page_table.long().gather(1, keys // block_size)
    return pages * block_size + keys % block_size


def _attend_decodes(part: _Decodes, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
    num_kv_heads, head_dim = k_cache.shape[1:]
    num_seqs, _, num_keys = part.hidden.shape
    q = q if part.rows is None else q.index_select(0, part.rows)
    wide = _wide_dtype(q.dtype)
    queries = q.reshape(num_seqs * num_kv_heads, -1, head_dim).to(wide)
    keys, values = (
        cache.view(-1, head_dim).index_select(0, part.cache_rows).view(-1, num_keys, head_dim).to(wide)
        for cache in (k_cache, v_cache)
    )
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
    scores.view(num_seqs, -1, num_keys).masked_fill_(part.hidden, -torch.inf)
    result = torch.bmm(scores.softmax(-1), values).view(num_seqs, -1, head_dim)
    if part.rows is None:
        out.copy_(result)
    else:
        out.index_copy_(0, part.rows, result.to(out.dtype))


def _attend_chunk(part: _Chunk, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, out: Tensor) -> None:
    num_kv_heads, head_dim = k_cache.shape[1:]
    num_queries, num_keys = part.hidden.shape
    wide = _wide_dtype(q.dtype)
    grouped = q[part.start : part.stop].reshape(num_queries, num_kv_heads, -1, head_dim).to(wide)
    queries = grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)  # rows: group, query
    keys, values = (cache.index_select(0, part.slots).to(wide) for cache in (k_cache, v_cache))
    scores = torch.bmm(queries, keys.permute(1, 2, 0)).mul_(scale)
    scores.view(num_kv_heads, -1, num_queries, num_keys).masked_fill_(part.hidden, -torch.inf)
    result = torch.bmm(scores.softmax(-1), values.transpose(0, 1))
    by_query = result.view(num_kv_heads, -1, num_queries, head_dim).permute(2, 0, 1, 3)
    out[part.start : part.stop].view(num_queries, num_kv_heads, -1, head_dim).copy_(by_query)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
