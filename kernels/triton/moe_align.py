"""Pairs of a row and one of its experts, in the order of the experts. P pairs, E experts.

Few pairs take one launch. A program takes an expert and needs nothing of the others: it counts the pairs of smaller
experts and its own, which gives the place of its first pair, then writes its pairs in ascending order. Every program
looks at all pairs, so many pairs take three launches: programs count the pairs of a chunk by expert; a program for each
expert finds from all counts where its pairs of each chunk begin; programs put the pairs of a chunk there.

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
_CHUNK = 256  # pairs
_PAIRS = 64  # that are compared together with all experts, and with the pairs of their chunk
_COUNTS = 4096  # that are read together, of several chunks and all experts
_COLUMN = tl.constexpr(256)  # counts of one expert that are read together
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
    num_chunks = triton.cdiv(num_pairs, _CHUNK)
    counts = torch.empty(num_chunks, num_experts, dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty_like(counts)
    sizes = {"NUM_EXPERTS": num_experts, "num_warps": 8, **overlapping(expert_ids)}
    experts = triton.next_power_of_2(num_experts)
    _count_kernel[(num_chunks,)](expert_ids, counts, num_pairs, EXPERTS=experts, PAIRS=_PAIRS, CHUNK=_CHUNK, **sizes)
    _start_kernel[(num_experts,)](
        counts,
        starts,
        table,
        firsts,
        num_blocks,
        num_chunks,
        block_len,
        EXPERTS=experts,
        CHUNKS=max(1, _COUNTS // experts),
        **sizes,
    )
    _place_kernel[(num_chunks,)](expert_ids, starts, order, num_pairs, PAIRS=_PAIRS, CHUNK=_CHUNK, **sizes)
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


@triton.jit(do_not_specialize=["num_blocks", "num_chunks", "block_len"])
def _start_kernel(
    counts,
    starts,
    table,
    firsts,
    num_blocks,
    num_chunks,
    block_len,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    own = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)[None, :]
    smaller = tl.zeros([CHUNKS, EXPERTS], tl.int32)
    for start in range(0, num_chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)[:, None]
        smaller += tl.load(counts + chunk * NUM_EXPERTS + expert, mask=(chunk < num_chunks) & (expert < own), other=0)
    first = tl.sum(smaller)
    end = first
    for start in range(0, num_chunks, _COLUMN):
        chunk = start + tl.arange(0, _COLUMN)
        inside = chunk < num_chunks
        column = tl.load(counts + chunk * NUM_EXPERTS + own, mask=inside, other=0)
        tl.store(starts + chunk * NUM_EXPERTS + own, end + tl.cumsum(column, 0) - column, mask=inside)
        end += tl.sum(column)
    tl.store(firsts + own, first)
    tl.store(firsts + NUM_EXPERTS, end, mask=own == NUM_EXPERTS - 1)
    _write_blocks(table, num_blocks, own, first, end, block_len, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    ids,
    starts,
    order,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(ids + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    earlier = tl.zeros([CHUNK, PAIRS], tl.int32)
    for start in range(0, CHUNK, PAIRS):
        other = chunk * CHUNK + start + tl.arange(0, PAIRS)
        expert = tl.load(ids + other, mask=other < num_pairs, other=-1).to(tl.int32)
        earlier += ((own[:, None] == expert[None, :]) & (other[None, :] < pair[:, None])).to(tl.int32)
    placed = (own >= 0) & (own < NUM_EXPERTS)
    place = tl.load(starts + chunk * NUM_EXPERTS + own, mask=placed, other=0) + tl.sum(earlier, 1)
    tl.store(order + place, pair, mask=placed)


@triton.jit
def block_of(table, num_blocks, CHANNELS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(expert, place of the first pair, where those of its expert end, first channel) of a program that takes a block
    of pairs and BLOCK_N of CHANNELS. The expert of an unused block is -1.
    """
    TILES: tl.constexpr = (CHANNELS + BLOCK_N - 1) // BLOCK_N
    entry = table + tl.program_id(0) // TILES
    start = tl.load(entry + num_blocks)
    return tl.load(entry), start, tl.load(entry + 2 * num_blocks), tl.program_id(0) % TILES * BLOCK_N


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
