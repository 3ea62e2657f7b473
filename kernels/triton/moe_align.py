"""Pairs of a row and one of its experts, in the order of the experts. P pairs, E experts.

Few pairs take one launch. A program takes an expert and needs nothing of the others: it counts the pairs of smaller
experts and its own, which gives the place of its first pair, then writes its pairs in ascending order. Every program
looks at all pairs, so many pairs take two launches: programs count the pairs of a chunk by expert, then each finds from
all counts where its chunk's pairs of each expert go.

A block is up to M pairs of one expert. The blocks of expert e begin at (pairs before it + e (M - 1)) // M: that leaves
room for its pairs in whole blocks, and needs no sum over other experts' blocks. What is left between is marked unused.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

_FEW_PAIRS = (512, 2048, 4096)  # up to so many take one launch; no more variants, each is a compilation
_MIN_CHUNK = 256
_MAX_CHUNKS = 128
_CHUNKS = 16  # whose counts are read together
_PAIRS = 64  # that are compared with all experts together
_TABLE = tl.constexpr(32)  # blocks that are written together


class PairBlocks(NamedTuple):
    """`order` holds pairs r K + k, expert by expert. `table` holds the expert of a block, -1 where it is unused, the
    place of its first pair in `order`, and where the pairs of its expert end. `firsts` holds where the pairs of each
    expert begin, then where the last one's end.

    Shapes: order [P] int32, table [3, B] int32, firsts [E + 1] int32.
    """

    order: Tensor
    table: Tensor
    firsts: Tensor
    block_len: int


def align(expert_ids: Tensor, num_experts: int, block_len: int) -> PairBlocks:
    """The pairs of contiguous ids; those with id -1 are in no block. E is at least 1."""
    num_pairs = expert_ids.numel()
    num_blocks = (num_pairs + num_experts * (block_len - 1)) // block_len
    order = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    table = torch.empty(3, num_blocks, dtype=torch.int32, device=expert_ids.device)
    firsts = torch.empty(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    if num_pairs <= _FEW_PAIRS[-1]:
        chunk = next(size for size in _FEW_PAIRS if num_pairs <= size)
        _align_kernel[(num_experts,)](
            expert_ids,
            order,
            table,
            firsts,
            num_pairs,
            num_blocks,
            block_len,
            NUM_EXPERTS=num_experts,
            CHUNK=chunk,
            num_warps=4 if chunk == _FEW_PAIRS[0] else 8,
            **overlapping(expert_ids),
        )
        return PairBlocks(order, table, firsts, block_len)
    chunk = max(_MIN_CHUNK, triton.next_power_of_2(triton.cdiv(num_pairs, _MAX_CHUNKS)))
    num_chunks = triton.cdiv(num_pairs, chunk)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=expert_ids.device)
    sizes = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "PAIRS": _PAIRS,
        "CHUNK": chunk,
    }
    _count_kernel[(num_chunks,)](expert_ids, counts, num_pairs, **sizes, num_warps=8, **overlapping(expert_ids))
    _place_kernel[(num_chunks,)](
        expert_ids,
        counts,
        order,
        table,
        firsts,
        num_pairs,
        num_blocks,
        num_chunks,
        block_len,
        **sizes,
        CHUNKS=_CHUNKS,
        num_warps=8,
        **overlapping(expert_ids),
    )
    return PairBlocks(order, table, firsts, block_len)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "block_len"])
def _align_kernel(
    ids,
    order,
    table,
    firsts,
    num_pairs,
    num_blocks,
    block_len,
    NUM_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert = tl.program_id(0)
    pair = tl.arange(0, CHUNK)
    own = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    match = (own == expert).to(tl.int32)
    first = tl.sum(((own >= 0) & (own < expert)).to(tl.int32))
    end = first + tl.sum(match)
    tl.store(order + first + tl.cumsum(match, 0) - 1, pair, mask=match > 0)
    tl.store(firsts + expert, first)
    if expert == NUM_EXPERTS - 1:
        tl.store(firsts + NUM_EXPERTS, end)
    _write_blocks(table, num_blocks, expert, first, end, block_len, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids,
    counts,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, CHUNK, PAIRS):
        pair = tl.program_id(0) * CHUNK + start + tl.arange(0, PAIRS)
        own = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        total += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * NUM_EXPERTS + expert, total, mask=expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "num_chunks", "block_len"])
def _place_kernel(
    ids,
    counts,
    order,
    table,
    firsts,
    num_pairs,
    num_blocks,
    num_chunks,
    block_len,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    own_chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)[:, None]
        inside = (chunk < num_chunks) & (expert < NUM_EXPERTS)[None, :]
        part = tl.load(counts + chunk * NUM_EXPERTS + expert[None, :], mask=inside, other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where(chunk < own_chunk, part, 0), 0)
    first = tl.cumsum(total, 0) - total
    if own_chunk == 0:
        tl.store(firsts + expert, first, mask=expert < NUM_EXPERTS)
        tl.store(firsts + expert + 1, first + total, mask=expert == NUM_EXPERTS - 1)
    place = first + before
    for start in range(0, CHUNK, PAIRS):
        pair = own_chunk * CHUNK + start + tl.arange(0, PAIRS)
        own = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        match = (own[:, None] == expert[None, :]).to(tl.int32)
        target = tl.sum(match * (tl.cumsum(match, 0) - 1 + place[None, :]), 1)
        tl.store(order + target, pair, mask=(own >= 0) & (own < NUM_EXPERTS))
        place += tl.sum(match, 0)
    for own_expert in range(own_chunk, NUM_EXPERTS, num_chunks):
        own_first = tl.sum(tl.where(expert == own_expert, first, 0))
        own_end = own_first + tl.sum(tl.where(expert == own_expert, total, 0))
        _write_blocks(table, num_blocks, own_expert, own_first, own_end, block_len, NUM_EXPERTS)


@triton.jit
def _write_blocks(table, num_blocks, expert, first, end, block_len, NUM_EXPERTS: tl.constexpr):
    """The blocks of an expert whose pairs stand from `first` to before `end`."""
    block = (first + expert * (block_len - 1)) // block_len
    end_block = (end + (expert + 1) * (block_len - 1)) // block_len
    if expert == NUM_EXPERTS - 1:
        end_block = num_blocks
    for start in range(block, end_block, _TABLE):
        idx = start + tl.arange(0, _TABLE)
        pair = first + (idx - block) * block_len
        inside = idx < end_block
        tl.store(table + idx, tl.where(pair < end, expert, -1), mask=inside)
        tl.store(table + num_blocks + idx, pair, mask=inside)
        tl.store(table + 2 * num_blocks + idx, tl.zeros_like(pair) + end, mask=inside)
