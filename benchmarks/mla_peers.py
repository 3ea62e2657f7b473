"""Latent decode by FlashMLA and FlashAttention-3, in the builds that vLLM brings, if it is installed."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q, cache, page table
Peer: TypeAlias = Callable[[Inputs], list[Tensor]]

LATENT = 512
_MODULES = {
    "FlashMLA": "vllm.third_party.flashmla.flash_mla_interface",
    "FlashAttention-3": "vllm.vllm_flash_attn.flash_attn_interface",
}
_MAX_SPLITS = 32  # what vLLM allows under CUDA graphs


def mla_peers(kv_lens: Tensor, query_len: int, heads: int, page_size: int, scale: float) -> dict[str, Peer | str]:
    """What runs each peer on sequences of equal length, or why it can't run. Their schedules are made ahead."""
    return {
        "FlashMLA": _made(_flash_mla, "FlashMLA", kv_lens, query_len, heads, page_size, scale),
        "FlashAttention-3": _made(_flash_attention, "FlashAttention-3", kv_lens, query_len, heads, page_size, scale),
    }


def _made(make: Callable[..., Peer], name: str, *arguments: Any) -> Peer | str:
    try:
        return make(importlib.import_module(_MODULES[name]), *arguments)
    except (ImportError, RuntimeError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _flash_mla(module: ModuleType, kv_lens: Tensor, query_len: int, heads: int, page_size: int, scale: float) -> Peer:
    plan, _ = module.get_mla_metadata()

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        cache = rows.view(-1, page_size, 1, rows.shape[1])
        by_seq = q.view(-1, query_len, heads, q.shape[2])
        return [module.flash_mla_with_kvcache(by_seq, cache, table, kv_lens, LATENT, plan, None, scale, True)[0]]

    return run


def _flash_attention(
    module: ModuleType, kv_lens: Tensor, query_len: int, heads: int, page_size: int, scale: float
) -> Peer:
    num_seqs, longest = len(kv_lens), int(kv_lens.max())
    starts = torch.arange(0, (num_seqs + 1) * query_len, query_len, device=kv_lens.device, dtype=torch.int32)
    plan = module.get_scheduler_metadata(
        batch_size=num_seqs,
        max_seqlen_q=query_len,
        max_seqlen_k=longest,
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=64,
        cache_seqlens=kv_lens,
        qkv_dtype=torch.bfloat16,
        headdim_v=LATENT,
        page_size=page_size,
        cu_seqlens_q=starts,
        causal=True,
        num_splits=_MAX_SPLITS,
    )

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        cache = rows.view(-1, page_size, 1, rows.shape[1])
        found = module.flash_attn_varlen_func(
            q=q[..., LATENT:],
            k=cache[..., LATENT:],
            v=cache[..., :LATENT],
            q_v=q[..., :LATENT],
            max_seqlen_q=query_len,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=kv_lens,
            block_table=table,
            softmax_scale=scale,
            causal=True,
            fa_version=3,
            scheduler_metadata=plan,
            num_splits=_MAX_SPLITS,
        )
        return [found]

    return run
