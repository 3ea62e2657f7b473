"""Attention over paged keys and values in Triton; the contract stands in kernels/paged_attention.py.

Sequences of one query go one way (paged_decode), all others another (paged_prefill). Softmax weights are rounded to the
dtype of the values before the second product.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.triton.paged_decode import attend_single
from dist_infer.kernels.triton.paged_prefill import attend_tiles, plan_prefill, tile_shape


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
    has_single, has_longer = bool((query_lens == 1).any()), bool((query_lens > 1).any())
    parts_of = cache(lambda queries, keys: plan_prefill(step, queries, keys, window))  # the same for all layers

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        q = q if q.stride(2) == 1 else q.contiguous()
        if has_single:
            attend_single(step, q, k_cache, v_cache, scale, out, window, batch_invariant=batch_invariant)
        if has_longer:
            group = q.shape[1] // num_kv_heads
            shape = tile_shape(q.dtype, q.shape[2], group)
            for part in parts_of(shape.rows // group, shape.keys):
                attend_tiles(step, part, shape, q, k_cache, v_cache, scale, out, window)
        return out

    return attend
