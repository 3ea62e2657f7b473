"""Latent attention over pages in Triton; the contract stands in kernels/mla_attention.py.

Sequences with one query absorb kv_b (mla_absorbed), all others expand it (mla_expanded). In a step of both kinds the
former are gathered into a step of their own.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.triton.mla_absorbed import attend_absorbed
from dist_infer.kernels.triton.mla_expanded import attend_expanded, plan_expanded

# (step, q, cache, kv_b, scale, out): fills `out` for a step in which each sequence has one query
AttendAbsorbed: TypeAlias = Callable[[PagedStep, Tensor, Tensor, Tensor, float, Tensor], None]


def plan_mla_attention(
    step: PagedStep, *, kv_lora_rank: int, scale: float, absorbed: AttendAbsorbed = attend_absorbed
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See `dist_infer.kernels.mla_attention.plan_mla_attention`. `absorbed` serves sequences with one query."""
    query_lens = np.diff(step.host_query_start)
    singles = np.flatnonzero(query_lens == 1)
    whole = len(singles) == step.num_seqs
    rows, single_step = (None, step) if whole else _take_singles(step, singles)
    parts_of = functools.cache(lambda wide: plan_expanded(step, wide=wide))  # the same for all layers

    def attend(q: Tensor, cache: Tensor, kv_b: Tensor) -> Tensor:
        value_dim = kv_b.shape[1] - (q.shape[2] - (cache.shape[1] - kv_lora_rank))
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        if len(q) == 0:
            return out
        q = q if q.stride(2) == 1 else q.contiguous()
        for part in parts_of(q.dtype == torch.float32):
            attend_expanded(step, part, q, cache, kv_b, scale, out)
        if rows is None:
            absorbed(single_step, q, cache, kv_b, scale, out)
        elif len(rows):
            single_out = torch.empty(len(rows), *out.shape[1:], dtype=q.dtype, device=q.device)
            absorbed(single_step, q.index_select(0, rows), cache, kv_b, scale, single_out)
            out.index_copy_(0, rows, single_out)
        return out

    return attend


def _take_singles(step: PagedStep, seqs: npt.NDArray[np.int64]) -> tuple[Tensor, PagedStep]:
    """(token rows, a step of these sequences alone).

    Stream: the current one; the host waits for nothing.
    """
    query_start = np.arange(len(seqs) + 1, dtype=np.int32)
    on_host = torch.from_numpy(np.concatenate([seqs, step.host_query_start[seqs], query_start]))
    device = step.kv_lens.device
    if device.type == "cuda":
        on_host = on_host.pin_memory()  # torch keeps it until the copy is done
    ids, rows, starts = on_host.to(device, non_blocking=True).split_with_sizes([len(seqs), len(seqs), len(seqs) + 1])
    taken = PagedStep(
        query_start=starts.int(),
        kv_lens=step.kv_lens.index_select(0, ids),
        page_table=step.page_table.index_select(0, ids),
        block_size=step.block_size,
        host_query_start=query_start,
        host_kv_lens=step.host_kv_lens[seqs],
    )
    return rows, taken
