"""Latent attention of steps in which each sequence has one query, with the decode of kernels/cute/mla_decode.

S sequences, N heads, L latent, R rotated, P plain and V value channels: q [S, N, P + R], kv_b [N, P + V, L].
"""

from functools import cache

import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep, QuantizedTensor
from dist_infer.kernels.cute.mla_decode import Decode, Workspace, choose_rows
from dist_infer.kernels.phases import Attend
from dist_infer.kernels.triton.mla_heads import apply_values, fold_queries


def plan_mla_attention(
    step: PagedStep,
    *,
    kv_lora_rank: int,
    scale: float,
    batch_invariant: bool = False,
    num_workers: int | None = None,
) -> Attend:
    """See `dist_infer.kernels.mla_attention.plan_mla_attention`; its generation phase alone.

    `num_workers` as of mla_decode, as many as the device has room for at most.
    """
    if batch_invariant:
        raise ValueError("mla_attention by cute cuts sequences by the batch")
    workspace = cache(Workspace)  # one for all layers of the step
    decodes: dict[tuple[torch.Size, torch.dtype], Decode] = {}  # prepared by the first layer, for all

    def attend(
        q: Tensor,
        cache_rows: Tensor,
        kv_b: Tensor,
        cache_scale: Tensor | None = None,
        quantized: QuantizedTensor | None = None,
    ) -> Tensor:
        value_dim = kv_b.shape[1] - (q.shape[2] - (cache_rows.shape[1] - kv_lora_rank))
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        if len(q) == 0:
            return out
        folded = fold_queries(q if q.stride(2) == 1 else q.contiguous(), kv_b, value_dim)
        latents = torch.empty(*q.shape[:2], kv_lora_rank, dtype=q.dtype, device=q.device)
        key = folded.shape, cache_rows.dtype
        if key not in decodes:
            decodes[key] = prepare(folded, cache_rows)
        decodes[key](folded, cache_rows, latents, cache_scale=cache_scale)
        apply_values(latents, kv_b, out, quantized=quantized)
        return out

    def prepare(folded: Tensor, cache_rows: Tensor) -> Decode:
        heads = folded.shape[1]
        rows = choose_rows(heads)
        space = workspace(rows, folded.device)
        return Decode(
            folded,
            cache_rows,
            step.page_table,
            step.kv_lens,
            page_size=step.block_size,
            query_len=1,
            scale=scale,
            workspace=space,
            num_workers=num_workers and min(num_workers, space.num_ctas // -(-heads // rows)),
        )

    return attend
