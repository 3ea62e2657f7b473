"""RMSNorm of heads that several ranks share, their sums through peer memory, and the rotation: in one Triton kernel.

The contract stands in kernels/qk_norm.py. T tokens, N and K query and KV heads of this rank, H head dim.
"""

import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.all_reduce import PeerSpace
from dist_infer.kernels.carriers import QkNorm, Rotation
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.peer_words import await_quad, clear_quad, push_quad
from dist_infer.kernels.triton.qk_norm import arguments, finish_token, head_sizes, squares_of, widths
from dist_infer.kernels.triton.reduced_rows import flip_turn, slot_of, turn_of


@triton.jit
def _push_squares(
    source,
    table,
    space,
    slots_at,
    slot_bytes,
    row_stride,
    token,
    rank,
    counts_keys,
    NUM_RANKS: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    """Send this rank's sums of a token to every peer; gives them back, and the turn of the row."""
    q_squares = squares_of(source, Q_WIDTH, Q_TILE)
    k_squares = squares_of(source + Q_WIDTH, K_WIDTH, K_TILE)
    k_squares = tl.where(counts_keys, k_squares, 0.0)
    parity = tl.load(turn_of(space, token), volatile=True)
    for step in tl.static_range(1, NUM_RANKS):
        peer = (rank + step) % NUM_RANKS
        slot = parity * (NUM_RANKS - 1) + slot_of(rank, peer)
        push_quad(
            tl.load(table + peer) + slots_at + slot * slot_bytes + token * row_stride,
            q_squares.to(tl.int32, bitcast=True),
            k_squares.to(tl.int32, bitcast=True),
        )
    return q_squares, k_squares, parity


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "memory_stride",
        "first_rank",
        "slots_at",
        "slot_bytes",
        "row_stride",
        "counted",
        "cache_stride",
    ]
)
def _reduced_kernel(
    qkv,
    q_weight,
    k_weight,
    out,
    cos,
    sin,
    slots,
    k_cache,
    v_cache,
    slot_stride,
    num_tokens,
    token_stride,
    q_channels,
    k_channels,
    eps,
    memory,
    memory_stride,
    table,
    first_rank,
    slots_at,
    slot_bytes,
    row_stride,
    counted,
    cache_stride,
    NUM_RANKS: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As one_shot_kernel, with the two sums of a token for its row: places, turns and why they suffice are the same."""
    wait_for_inputs(OVERLAP)
    local = tl.program_id(1)
    rank = first_rank + local
    counts_keys = ((counted >> local) & 1) != 0
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    slot_bytes = tl.cast(slot_bytes, tl.int64)
    first_token = local.to(tl.int64) * num_tokens
    qkv += first_token * token_stride
    out += first_token * Q_WIDTH
    q_weight += local * Q_WIDTH
    k_weight += local * K_WIDTH
    k_cache += local.to(tl.int64) * cache_stride
    v_cache += local.to(tl.int64) * cache_stride
    for number in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(number, tl.int64)
        source = qkv + token * token_stride
        own_q, own_k, parity = _push_squares(
            source, table, space, slots_at, slot_bytes, row_stride, token, rank, counts_keys,
            NUM_RANKS, Q_WIDTH, K_WIDTH, Q_TILE, K_TILE,
        )  # fmt: skip
        start = space + slots_at + parity * (NUM_RANKS - 1) * slot_bytes + token * row_stride
        q_squares = 0.0
        k_squares = 0.0
        previous_q, previous_k = own_q, own_k
        for source_rank in tl.static_range(NUM_RANKS):
            term_q, term_k = own_q, own_k
            if source_rank > 0:
                term_q = tl.where(source_rank > rank, previous_q, own_q)
                term_k = tl.where(source_rank > rank, previous_k, own_k)
            if source_rank < NUM_RANKS - 1:
                words = await_quad(start + source_rank * slot_bytes)
                previous_q = words[0].to(tl.float32, bitcast=True)
                previous_k = words[1].to(tl.float32, bitcast=True)
                term_q = tl.where(source_rank < rank, previous_q, term_q)
                term_k = tl.where(source_rank < rank, previous_k, term_k)
            q_squares += term_q
            k_squares += term_k
        tl.debug_barrier()  # all threads have read sums and turn
        for slot in tl.static_range(NUM_RANKS - 1):
            clear_quad(start + slot * slot_bytes)
        flip_turn(turn_of(space, token), parity, 0, 1)
        finish_token(
            source, out, token, q_squares, k_squares,
            q_weight, k_weight, q_channels, k_channels, eps, cos, sin, slots, k_cache, v_cache, slot_stride,
            Q_WIDTH, K_WIDTH, K_TILE, Q_HEADS, K_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip


def reduced_norm_rotary(qkv: Tensor, norm: QkNorm, rotation: Rotation, space: PeerSpace) -> Tensor:
    """See `dist_infer.kernels.qk_norm.reduced_norm_rotary`."""
    num_tokens, num_all, head_dim = qkv.shape[-3:]
    num_kv_heads = rotation.k_cache.shape[-2]
    out = qkv.new_empty(*qkv.shape[:-2], num_all - 2 * num_kv_heads, head_dim)
    if num_tokens:
        layout = space.layout
        sizes, num_warps = widths(num_all, num_kv_heads, head_dim)
        _reduced_kernel[min(num_tokens, space.max_programs), space.num_local](
            qkv,
            *arguments(qkv, norm, rotation, out),
            space.memory,
            0 if space.memory.dim() == 1 else space.memory.stride(0),
            space.table,
            space.rank,
            layout.slots,
            layout.slot_bytes,
            layout.row_bytes,
            sum(1 << idx for idx, counts in enumerate(norm.counts_keys) if counts),
            rotation.k_cache.stride(0),
            NUM_RANKS=layout.num_ranks,
            **sizes,
            **head_sizes(num_all, rotation),
            num_warps=num_warps,
            **overlapping(qkv, alone=not space.shares_device),
        )
    return out
