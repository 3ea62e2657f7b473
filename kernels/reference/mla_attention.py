"""Latent attention over pages in plain torch; the contract stands in kernels/mla_attention.py.

Sequences with few queries are absorbed: the key half of kv_b is folded into the queries, the value half is applied to
the attended latents, and those of similar length are multiplied together. Longer ones are expanded: keys and values of
all heads are made from the sequence's latents once, then read by blocks of queries that bound the size of the scores.
Rows of an absorbed block that stand for no key repeat the sequence's own last one, so that nothing stale shows.

S sequences, T tokens, N heads, L latent, R rotated, P plain and V value channels, K keys of a block, Q queries.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep, QuantizedTensor
from dist_infer.kernels.phases import Attend
from dist_infer.kernels.reference.quantize import quantize

_MAX_SCORES = 1 << 20  # queries x keys of a block, for each head
_SHORT_BITS = 6  # sequences of up to 64 keys are batched together, then by powers of two


@dataclass(frozen=True, slots=True)
class _Absorbed:
    """Sequences with equally many queries."""

    rows: Tensor  # [S * Q] token rows
    slots: Tensor  # [S * K]
    hidden: Tensor  # [S, Q, K] True where a query must not look


@dataclass(frozen=True, slots=True)
class _Expanded:
    """One sequence, its queries in blocks of token rows."""

    first: int
    history: int
    slots: Tensor  # [K]
    blocks: tuple[tuple[int, int], ...]


def plan_mla_attention(
    step: PagedStep, *, kv_lora_rank: int, scale: float, batch_invariant: bool = False, max_absorbed: int = 1
) -> Attend:
    """See `dist_infer.kernels.mla_attention.plan_mla_attention`; sequences of up to `max_absorbed` queries absorb."""
    query_lens = np.diff(step.host_query_start)
    active = (query_lens > 0) & (step.host_kv_lens > 0)
    short = active & (query_lens <= max_absorbed)
    chosen = np.flatnonzero(short).tolist()
    groups = [[seq] for seq in chosen] if batch_invariant else _by_size(step, chosen)
    absorbed = [_plan_absorbed(step, seqs) for seqs in groups]
    expanded = [_plan_expanded(step, seq) for seq in np.flatnonzero(active & ~short).tolist()]

    def attend(
        q: Tensor,
        cache: Tensor,
        kv_b: Tensor,
        cache_scale: Tensor | None = None,
        quantized: QuantizedTensor | None = None,
    ) -> Tensor:
        value_dim = kv_b.shape[1] - (q.shape[2] - (cache.shape[1] - kv_lora_rank))
        out = q.new_zeros(*q.shape[:2], value_dim)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        weight = kv_b.to(wide)
        for part in absorbed:
            rows = _rows(cache, part.slots, cache_scale, wide)
            _attend_absorbed(part, q, rows, weight, scale, out)
        for sequence in expanded:
            rows = _rows(cache, sequence.slots, cache_scale, wide)
            _attend_expanded(sequence, q, rows, weight, scale, out)
        if quantized is not None:
            quantize(out.flatten(1), quantized)
        return out

    return attend


def _by_size(step: PagedStep, chosen: list[int]) -> list[list[int]]:
    """The chosen sequences; together those with equally many queries and a similar number of keys."""
    groups: dict[tuple[int, int], list[int]] = {}
    query_lens = np.diff(step.host_query_start)
    for seq in chosen:
        bits = (int(step.host_kv_lens[seq]) - 1).bit_length()
        groups.setdefault((int(query_lens[seq]), max(bits, _SHORT_BITS)), []).append(seq)
    return list(groups.values())


def _plan_absorbed(step: PagedStep, seqs: list[int]) -> _Absorbed:
    device = step.kv_lens.device
    index = torch.tensor(seqs, device=device)
    kv_lens = step.kv_lens.index_select(0, index).long()
    num_queries = int(np.diff(step.host_query_start)[seqs[0]])
    query = torch.arange(num_queries, device=device)
    key = torch.arange(int(step.host_kv_lens[seqs].max()), device=device)
    rows = step.query_start.index_select(0, index).long()[:, None] + query
    slots = _slots(step.page_table.index_select(0, index), torch.minimum(key, kv_lens[:, None] - 1), step.block_size)
    seen = kv_lens[:, None] - num_queries + query + 1  # [S, Q]
    return _Absorbed(rows.flatten(), slots.flatten(), key >= seen[..., None])


def _plan_expanded(step: PagedStep, seq: int) -> _Expanded:
    first, last = step.host_query_start[seq : seq + 2].tolist()
    kv_len = int(step.host_kv_lens[seq])
    key = torch.arange(kv_len, device=step.kv_lens.device)
    slots = _slots(step.page_table[seq : seq + 1], key[None], step.block_size)[0]
    block_len = max(1, _MAX_SCORES // kv_len)
    blocks = tuple((start, min(start + block_len, last)) for start in range(first, last, block_len))
    return _Expanded(first, kv_len - (last - first), slots, blocks)


def _slots(page_table: Tensor, keys: Tensor, block_size: int) -> Tensor:
    """[S, K] flat slots of token indices `keys` [S, K]."""
    pages = page_table.long().gather(1, keys // block_size)
    return pages * block_size + keys % block_size


def _rows(cache: Tensor, slots: Tensor, cache_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if cache_scale is None:
        return cache.index_select(0, slots).to(dtype)
    return cache.view(torch.uint8).index_select(0, slots).view(cache.dtype).to(dtype) * cache_scale.to(dtype)


def _attend_absorbed(part: _Absorbed, q: Tensor, rows: Tensor, kv_b: Tensor, scale: float, out: Tensor) -> None:
    num_heads, _, latent_dim = kv_b.shape
    plain_dim = kv_b.shape[1] - out.shape[2]
    num_seqs, num_queries, num_keys = part.hidden.shape
    queries = q.index_select(0, part.rows).to(kv_b.dtype)
    folded = torch.bmm(queries[..., :plain_dim].transpose(0, 1), kv_b[:, :plain_dim]).transpose(0, 1)
    queries = torch.cat([folded, queries[..., plain_dim:]], -1).view(num_seqs, num_queries * num_heads, -1)
    rows = rows.view(num_seqs, num_keys, -1)
    scores = torch.bmm(queries, rows.transpose(1, 2)).mul_(scale)
    by_query = scores.view(num_seqs, num_queries, num_heads, num_keys)
    by_query.masked_fill_(part.hidden[:, :, None], -torch.inf)
    latents = torch.bmm(scores.softmax(-1), rows[..., :latent_dim]).view(-1, num_heads, latent_dim)
    values = torch.bmm(latents.transpose(0, 1), kv_b[:, plain_dim:].transpose(1, 2)).transpose(0, 1)
    out.index_copy_(0, part.rows, values.to(out.dtype))


def _attend_expanded(part: _Expanded, q: Tensor, rows: Tensor, kv_b: Tensor, scale: float, out: Tensor) -> None:
    num_heads, _, latent_dim = kv_b.shape
    plain_dim = kv_b.shape[1] - out.shape[2]
    expanded = torch.matmul(rows[:, :latent_dim], kv_b.transpose(1, 2))  # [N, K, P + V]
    rotated = rows[None, :, latent_dim:].expand(num_heads, -1, -1)
    keys, values = torch.cat([expanded[..., :plain_dim], rotated], -1), expanded[..., plain_dim:]
    key = torch.arange(len(rows), device=q.device)
    for start, stop in part.blocks:
        num_keys = part.history + stop - part.first
        last_seen = part.history + torch.arange(start - part.first, stop - part.first, device=q.device)
        queries = q[start:stop].to(kv_b.dtype).transpose(0, 1)
        scores = torch.bmm(queries, keys[:, :num_keys].transpose(1, 2)).mul_(scale)
        scores.masked_fill_(key[:num_keys] > last_seen[:, None], -torch.inf)
        out[start:stop] = torch.bmm(scores.softmax(-1), values[:, :num_keys]).transpose(0, 1)
