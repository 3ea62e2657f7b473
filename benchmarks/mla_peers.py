"""Latent decode by FlashMLA and FlashAttention-3, in the builds that vLLM brings (see vllm_wheel).

They plan once for sequences of equal length, before anything is timed, as an engine does once a step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.vllm_wheel import compiled_ops, peer_or_reason

Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]  # q, cache, page table
Peer: TypeAlias = Callable[[Inputs], list[Tensor]]

LATENT = 512
_FLASH_MLA = "_flashmla_C.abi3.so"
_FLASH_MLA_FP8 = "_flashmla_extension_C.abi3.so"
_FLASH_ATTENTION = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
_MAX_SPLITS = 32  # what vLLM allows in CUDA graphs


class Shape(NamedTuple):
    """Of the decodes that are measured."""

    kv_lens: Tensor
    query_len: int
    heads: int
    page_size: int
    scale: float


def mla_peers(shape: Shape, folder: Path | None) -> dict[str, Peer | str]:
    """What runs each peer on a cache of 16-bit numbers, or why it can't run."""
    return {
        "FlashMLA": peer_or_reason(lambda: flash_mla(shape, folder)),
        "FlashAttention-3": peer_or_reason(lambda: flash_attention(shape, folder)),
    }


def flash_mla(shape: Shape, folder: Path | None) -> Peer:
    """The dense decode. Its first call makes the plan that all later ones take."""
    decode = compiled_ops(folder, _FLASH_MLA, "_flashmla_C").dense_decode_fwd
    plan: list[Tensor | None] = [None, None]

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        cache = rows.view(-1, shape.page_size, 1, rows.shape[1])
        by_seq = q.view(-1, shape.query_len, shape.heads, q.shape[2])
        out, _, *plan[:] = decode(by_seq, cache, LATENT, shape.kv_lens, table, shape.scale, True, *plan, None)
        return [out]

    return run


def flash_mla_fp8(shape: Shape, cache_scale: Tensor, folder: Path | None) -> Peer:
    """The decode over a cache of E4M3 with one scale. Queries are E4M3 too, quantised by the caller with scale 1."""
    ops = compiled_ops(folder, _FLASH_MLA_FP8, "_flashmla_extension_C")
    plan, num_splits = ops.get_mla_decoding_metadata_dense_fp8(shape.kv_lens, shape.heads * shape.query_len, 1)
    one = torch.ones(1, dtype=torch.float32, device=shape.kv_lens.device)

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        cache = rows.view(-1, shape.page_size, 1, rows.shape[1])
        by_seq = q.view(-1, shape.query_len, shape.heads, q.shape[2])
        found = ops.fwd_kvcache_mla_fp8(
            by_seq, cache, LATENT, shape.kv_lens, table, shape.scale, True, plan, num_splits, one, cache_scale
        )
        return [found[0]]

    return run


def flash_attention(shape: Shape, folder: Path | None) -> Peer:
    """Rotated keys as keys, latents as values, and queries for both."""
    ops = compiled_ops(folder, _FLASH_ATTENTION, "_vllm_fa3_C")
    num_seqs, longest = len(shape.kv_lens), int(shape.kv_lens.max())
    ends = (num_seqs + 1) * shape.query_len
    starts = torch.arange(0, ends, shape.query_len, device=shape.kv_lens.device, dtype=torch.int32)
    plan = ops.get_scheduler_metadata(
        *(num_seqs, shape.query_len, longest, shape.heads, 1, 64, LATENT, torch.bfloat16, shape.kv_lens, starts),
        *(None, None, None, None),  # lengths of packed and of new keys, queries used, padding on the left
        *(shape.page_size, 0, True, -1, -1, False, _MAX_SPLITS, None, 0),
    )

    def run(inputs: Inputs) -> list[Tensor]:
        q, rows, table = inputs
        cache = rows.view(-1, shape.page_size, 1, rows.shape[1])
        found = ops.fwd(
            *(q[..., LATENT:], cache[..., LATENT:], cache[..., :LATENT], None, None, q[..., :LATENT], None),
            *(starts, None, None, None, shape.kv_lens, shape.query_len, longest, table),
            *(None, None, None, None, None),  # rows of a batch, padding on the left, rotation
            *(None, None, None, shape.scale, True, -1, -1, 0.0, True, plan, _MAX_SPLITS, None, 0, None, 1, 0, None),
        )
        return [found[0]]

    return run
