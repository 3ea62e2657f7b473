"""Rows of a vocabulary shard in Triton; the contract stands in kernels/embedding.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _embedding(token_ids, weight, out, first_id, num_rows, hidden, weight_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first_id
    held = (row >= 0) & (row < num_rows)
    inside = column < hidden
    values = tl.load(weight + row * weight_stride + column, mask=inside & held, other=0)
    tl.store(out + token * hidden + column, values, mask=inside)


def embedding(token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """See `dist_infer.kernels.embedding.embedding`."""
    num_tokens, hidden = len(token_ids), weight.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=weight.dtype, device=weight.device)
    if out.numel():
        grid = (num_tokens, triton.cdiv(hidden, _BLOCK))
        _embedding[grid](
            token_ids, weight, out, first_id, len(weight), hidden, weight.stride(0), BLOCK=_BLOCK, num_warps=8
        )
    return out
