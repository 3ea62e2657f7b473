"""Latent attention of steps in which each sequence has one query, with the decode of kernels/cute/mla_decode.

S sequences, N heads, L latent, R rotated, P plain and V value channels.
"""

from functools import cache

import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.cute.mla_decode import Workspace, choose_rows, mla_decode
from dist_infer.kernels.phases import Attend
from dist_infer.kernels.triton.mla_heads import apply_values, fold_queries


def plan_mla_attention(step: PagedStep, *, kv_lora_rank: int, scale: float, batch_invariant: bool = False) -> Attend:
    """See `dist_infer.kernels.mla_attention.plan_mla_attention`; its generation phase alone."""
    if batch_invariant:
        raise ValueError("mla_attention by cute cuts sequences by the batch")
    workspace = cache(Workspace)  # one for all layers of the step

    def attend(q: Tensor, cache_rows: Tensor, kv_b: Tensor, cache_scale: Tensor | None = None) -> Tensor:
        value_dim = kv_b.shape[1] - (q.shape[2] - (cache_rows.shape[1] - kv_lora_rank))
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        if len(q) == 0:
            return out
        q = q if q.stride(2) == 1 else q.contiguous()
        space = workspace(choose_rows(q.shape[1], narrow=cache_scale is not None), q.device)
        attend_absorbed(step, q, cache_rows, kv_b, scale, out, cache_scale, workspace=space)
        return out

    return attend


def attend_absorbed(
    step: PagedStep,
    q: Tensor,
    cache_rows: Tensor,
    kv_b: Tensor,
    scale: float,
    out: Tensor,
    cache_scale: Tensor | None,
    *,
    workspace: Workspace,
) -> None:
    """Fills `out` for a step in which each sequence has one query.

    Shapes: q [S, N, P + R], cache_rows [C, L + R], kv_b [N, P + V, L], out [S, N, V] contiguous.
    """
    folded = fold_queries(q, kv_b, out.shape[2])
    latents = torch.empty(*q.shape[:2], kv_b.shape[2], dtype=q.dtype, device=q.device)
    mla_decode(
        folded,
        cache_rows,
        step.page_table,
        step.kv_lens,
        page_size=step.block_size,
        query_len=1,
        scale=scale,
        workspace=workspace,
        out=latents,
        cache_scale=cache_scale,
    )
    apply_values(latents, kv_b, out)
