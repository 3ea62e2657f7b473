"""Pairs of a row and one of its experts, in the order of the experts, by one Triton launch at any size.

P pairs, E experts. A program takes an expert and needs nothing of the others: it counts the pairs of smaller experts
and its own, which gives the place of its first pair, then writes its pairs in ascending order.

A block is up to M pairs of one expert. The blocks of expert e begin at (pairs before it + e (M - 1)) // M: that leaves
room for its pairs in whole blocks, and needs no sum over other experts' blocks. What is left between is marked unused.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.triton.chained_launch import chained, wait_for_inputs

_MAX_CHUNK = 8192  # pairs that a program looks at together
_TABLE = tl.constexpr(32)  # blocks that it writes together


class PairBlocks(NamedTuple):
    """`order` holds pairs r K + k, expert by expert. `table` holds the expert of a block, -1 where it is unused, the
    place of its first pair in `order`, and where the pairs of its expert end.

    Shapes: order [P] int32, table [3, B] int32.
    """

    order: Tensor
    table: Tensor
    block_len: int


def align(expert_ids: Tensor, num_experts: int, block_len: int) -> PairBlocks:
    """The pairs of contiguous ids; those with id -1 are in no block. E is at least 1."""
    num_pairs = expert_ids.numel()
    num_blocks = (num_pairs + num_experts * (block_len - 1)) // block_len
    order = torch.empty(num_pairs, dtype=torch.int32, device=expert_ids.device)
    table = torch.empty(3, num_blocks, dtype=torch.int32, device=expert_ids.device)
    chunk = min(_MAX_CHUNK, triton.next_power_of_2(num_pairs))
    _align_kernel[(num_experts,)](
        expert_ids,
        order,
        table,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK=block_len,
        CHUNK=chunk,
        num_warps=4 if chunk <= 1024 else 16,
        **chained(expert_ids),
    )
    return PairBlocks(order, table, block_len)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _align_kernel(
    ids,
    order,
    table,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    wait_for_inputs(CHAINED)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    smaller = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        own = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        smaller += ((own >= 0) & (own < expert)).to(tl.int32)
        equal += (own == expert).to(tl.int32)
    first = tl.sum(smaller)
    end = first + tl.sum(equal)
    place = first
    for start in range(0, num_pairs, CHUNK):
        own = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=-1).to(tl.int32)
        match = (own == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(match, 0) - 1, start + lane, mask=match > 0)
        place += tl.sum(match)
    block = (first + expert * (BLOCK - 1)) // BLOCK
    end_block = (end + (expert + 1) * (BLOCK - 1)) // BLOCK
    if expert == NUM_EXPERTS - 1:
        end_block = num_blocks
    for start in range(block, end_block, _TABLE):
        idx = start + tl.arange(0, _TABLE)
        pair = first + (idx - block) * BLOCK
        inside = idx < end_block
        tl.store(table + idx, tl.where(pair < end, expert, -1), mask=inside)
        tl.store(table + num_blocks + idx, pair, mask=inside)
        tl.store(table + 2 * num_blocks + idx, tl.zeros_like(pair) + end, mask=inside)
