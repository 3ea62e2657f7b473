"""Latent attention over pages in Triton; the contract stands in kernels/mla_attention.py.

Sequences with one query absorb kv_b (mla_absorbed), all others expand it (mla_expanded). In a step of both kinds the
former are gathered into a step of their own.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep, QuantizedTensor
from dist_infer.kernels.phases import Attend, take_sequences
from dist_infer.kernels.triton.mla_absorbed import attend_absorbed
from dist_infer.kernels.triton.mla_expanded import attend_expanded, plan_expanded
from dist_infer.kernels.triton.quantize import quantize


def plan_mla_attention(step: PagedStep, *, kv_lora_rank: int, scale: float, batch_invariant: bool = False) -> Attend:
    """See `dist_infer.kernels.mla_attention.plan_mla_attention`."""
    query_lens = np.diff(step.host_query_start)
    singles = np.flatnonzero(query_lens == 1)
    whole = len(singles) == step.num_seqs
    rows, single_step = (None, step) if whole else take_sequences(step, singles)
    absorbed = functools.partial(attend_absorbed, batch_invariant=batch_invariant)
    parts_of = functools.cache(
        lambda wide: plan_expanded(step, wide=wide, one_by_one=batch_invariant)
    )  # the same for all layers

    def attend(
        q: Tensor,
        cache: Tensor,
        kv_b: Tensor,
        cache_scale: Tensor | None = None,
        quantized: QuantizedTensor | None = None,
    ) -> Tensor:
        value_dim = kv_b.shape[1] - (q.shape[2] - (cache.shape[1] - kv_lora_rank))
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        if len(q) == 0:
            return out
        q = q if q.stride(2) == 1 else q.contiguous()
        for part in parts_of(q.dtype == torch.float32):
            attend_expanded(step, part, q, cache, kv_b, scale, out, cache_scale)
        if rows is None:
            absorbed(single_step, q, cache, kv_b, scale, out, cache_scale, quantized=quantized)
            return out
        if len(rows):
            single_out = torch.empty(len(rows), *out.shape[1:], dtype=q.dtype, device=q.device)
            absorbed(single_step, q.index_select(0, rows), cache, kv_b, scale, single_out, cache_scale)
            out.index_copy_(0, rows, single_out)
        if quantized is not None:
            quantize(out.flatten(1), quantized)
        return out

    return attend
