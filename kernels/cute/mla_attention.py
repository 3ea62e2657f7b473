"""Latent attention with the decode of kernels/cute/mla_decode; all else of a step is Triton's.

S sequences with one query each, N heads, L latent, R rotated, P plain and V value channels.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.cute.mla_decode import PAGE_SIZES, Workspace, choose_rows, mla_decode
from dist_infer.kernels.triton.mla_attention import plan_mla_attention as plan_by_triton


def plan_mla_attention(
    step: PagedStep, *, kv_lora_rank: int, scale: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See `dist_infer.kernels.mla_attention.plan_mla_attention`. Other page sizes than mla_decode's are Triton's."""
    if step.block_size not in PAGE_SIZES:
        return plan_by_triton(step, kv_lora_rank=kv_lora_rank, scale=scale)
    workspace = cache(Workspace)  # one for all layers of the step

    def attend(step: PagedStep, q: Tensor, cache_rows: Tensor, kv_b: Tensor, scale: float, out: Tensor) -> None:
        space = workspace(choose_rows(q.shape[1]), q.device)
        attend_absorbed(step, q, cache_rows, kv_b, scale, out, workspace=space)

    return plan_by_triton(step, kv_lora_rank=kv_lora_rank, scale=scale, absorbed=attend)


def attend_absorbed(
    step: PagedStep, q: Tensor, cache_rows: Tensor, kv_b: Tensor, scale: float, out: Tensor, *, workspace: Workspace
) -> None:
    """Fills `out` for a step in which each sequence has one query.

    Shapes: q [S, N, P + R], cache_rows [C, L + R], kv_b [N, P + V, L], out [S, N, V] contiguous.
    """
    num_seqs, num_heads, _ = q.shape
    latent_dim = kv_b.shape[2]
    plain_dim = kv_b.shape[1] - out.shape[2]
    folded = torch.empty(num_seqs, num_heads, cache_rows.shape[1], dtype=q.dtype, device=q.device)
    by_head = folded[..., :latent_dim].transpose(0, 1)
    torch.bmm(q[..., :plain_dim].transpose(0, 1), kv_b[:, :plain_dim], out=by_head)
    folded[..., latent_dim:].copy_(q[..., plain_dim:])
    latents = torch.empty(num_seqs, num_heads, latent_dim, dtype=q.dtype, device=q.device)
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
    )
    torch.bmm(latents.transpose(0, 1), kv_b[:, plain_dim:].transpose(1, 2), out=out.transpose(0, 1))
