"""Token rows to all GPUs of a host and their sums back, in Triton; the contract stands in kernels/peer_rows.py.

Words are their own flags, as in kernels/triton/all_reduce.py: a row has two places in every slot, used in turn. Every
rank sends row b of its own in each call that has one, and waits for row b of all others, so none can be two calls ahead
of a rank that still reads. A program takes whole rows, and sends all of them before it waits for any.

A packed row is D columns, then the weights of its choices and their ids, each filled up to 16 bytes with zeros. N
ranks, B rows a rank, L lanes of 16 bytes.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.peer_rows import RowsSpace
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.peer_words import clear_words, load_words, peek_words, push_words, settle_words
from dist_infer.kernels.triton.reduced_rows import int32_at, row_sum, sent_words, slot_of
from dist_infer.kernels.triton.rms_norm import tile_of

_TOGETHER = tl.constexpr(4)  # slots of a row that are asked for at once
_SIZES = ("memory_stride", "first_rank", "num_rows", "max_rows", "slots")


@triton.jit
def _choice_word(ids, weights, row, lane, WORD: tl.constexpr, VECTORS: tl.constexpr, TOP_K: tl.constexpr):
    """Word WORD of the lanes that hold a row's weights and ids, 0 in all others."""
    PART: tl.constexpr = (TOP_K + 3) // 4
    weight = 4 * (lane - VECTORS) + WORD
    choice = weight - 4 * PART
    weight_words = weights.to(tl.pointer_type(tl.int32)) + row * TOP_K
    word = tl.load(weight_words + weight, mask=(weight >= 0) & (weight < TOP_K), other=0)
    return word | tl.load(ids + row * TOP_K + choice, mask=(choice >= 0) & (choice < TOP_K), other=0)


@triton.jit
def _packed_row(x_row, ids, weights, row, lane, VECTORS: tl.constexpr, TOP_K: tl.constexpr):
    """The words of a row of this rank, as its peers get them."""
    word_0, word_1, word_2, word_3 = sent_words(load_words(x_row + lane.to(tl.int64) * 16, lane < VECTORS))
    word_0 |= _choice_word(ids, weights, row, lane, 0, VECTORS, TOP_K)
    word_1 |= _choice_word(ids, weights, row, lane, 1, VECTORS, TOP_K)
    word_2 |= _choice_word(ids, weights, row, lane, 2, VECTORS, TOP_K)
    word_3 |= _choice_word(ids, weights, row, lane, 3, VECTORS, TOP_K)
    return word_0, word_1, word_2, word_3


@triton.jit
def _store_choice(
    word, ids_out, weights_out, row, lane, first, end, WORD: tl.constexpr, VECTORS: tl.constexpr, TOP_K: tl.constexpr
):
    PART: tl.constexpr = (TOP_K + 3) // 4
    weight = 4 * (lane - VECTORS) + WORD
    choice = weight - 4 * PART
    weight_words = weights_out.to(tl.pointer_type(tl.int32)) + row * TOP_K
    tl.store(weight_words + weight, word, mask=(weight >= 0) & (weight < TOP_K))
    own = tl.where((word >= first) & (word < end), word - first, -1)
    tl.store(ids_out + row * TOP_K + choice, own, mask=(choice >= 0) & (choice < TOP_K))


@triton.jit
def _store_row(words, x_out, ids_out, weights_out, row, lane, first, end, VECTORS: tl.constexpr, TOP_K: tl.constexpr):
    """A packed row to where row `row` of all ranks' rows is asked for."""
    push_words(x_out.to(tl.int64) + row * (VECTORS * 16) + lane.to(tl.int64) * 16, lane < VECTORS, words)
    _store_choice(words[0], ids_out, weights_out, row, lane, first, end, 0, VECTORS, TOP_K)
    _store_choice(words[1], ids_out, weights_out, row, lane, first, end, 1, VECTORS, TOP_K)
    _store_choice(words[2], ids_out, weights_out, row, lane, first, end, 2, VECTORS, TOP_K)
    _store_choice(words[3], ids_out, weights_out, row, lane, first, end, 3, VECTORS, TOP_K)


@triton.jit(do_not_specialize=[*_SIZES, "first", "end"])
def gather_kernel(
    x,
    ids,
    weights,
    x_out,
    ids_out,
    weights_out,
    memory,
    memory_stride,
    table,
    first_rank,
    num_rows,
    max_rows,
    slots,
    first,
    end,
    NUM_RANKS: tl.constexpr,
    VECTORS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Own rows into a slot of every peer, and to their place; then the peers' rows from their slots to theirs."""
    PACKED: tl.constexpr = VECTORS + 2 * ((TOP_K + 3) // 4)
    OTHERS: tl.constexpr = NUM_RANKS - 1
    lane = tl.arange(0, BLOCK)
    wanted = lane < PACKED
    local = tl.program_id(1)
    rank = first_rank + local
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    x_start = x.to(tl.int64) + local.to(tl.int64) * num_rows * (VECTORS * 16)
    ids += local.to(tl.int64) * num_rows * TOP_K
    weights += local.to(tl.int64) * num_rows * TOP_K
    all_rows = local.to(tl.int64) * NUM_RANKS * num_rows
    wait_for_inputs(OVERLAP)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        parity = tl.load(int32_at(space + row * 4), volatile=True)
        words = _packed_row(x_start + row * (VECTORS * 16), ids, weights, row, lane, VECTORS, TOP_K)
        for step in tl.static_range(1, NUM_RANKS):
            peer = (rank + step) % NUM_RANKS
            slot = (parity * OTHERS + slot_of(rank, peer)).to(tl.int64) * max_rows + row
            push_words(tl.load(table + peer) + slots + slot * (PACKED * 16) + lane.to(tl.int64) * 16, wanted, words)
        _store_row(
            words,
            x_out,
            ids_out,
            weights_out,
            all_rows + rank * num_rows + row,
            lane,
            first,
            end,
            VECTORS,
            TOP_K,
        )
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        turn = int32_at(space + row * 4)
        parity = tl.load(turn, volatile=True)
        for source in tl.static_range(OTHERS):
            slot = (parity * OTHERS + source).to(tl.int64) * max_rows + row
            address = space + slots + slot * (PACKED * 16) + lane.to(tl.int64) * 16
            words = settle_words((address,), peek_words(address, wanted), 1)
            clear_words(address, wanted)
            sender = tl.where(source < rank, source, source + 1)
            _store_row(
                words,
                x_out,
                ids_out,
                weights_out,
                all_rows + sender * num_rows + row,
                lane,
                first,
                end,
                VECTORS,
                TOP_K,
            )
        tl.debug_barrier()  # all warps have read the turn
        tl.store(turn, 1 - parity)


@triton.jit(do_not_specialize=[*_SIZES, "turns"])
def scatter_kernel(
    parts,
    out,
    memory,
    memory_stride,
    table,
    first_rank,
    num_rows,
    max_rows,
    slots,
    turns,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The parts of the peers' rows into their slots; then the sums of this rank's own."""
    DTYPE: tl.constexpr = parts.dtype.element_ty
    ROW_BYTES: tl.constexpr = VECTORS * 16
    OTHERS: tl.constexpr = NUM_RANKS - 1
    lane = tl.arange(0, BLOCK)
    lanes = lane.to(tl.int64) * 16
    wanted = lane < VECTORS
    columns = tl.arange(0, BLOCK * (HIDDEN // VECTORS))
    inside = columns < HIDDEN
    local = tl.program_id(1)
    rank = first_rank + local
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    parts_start = parts.to(tl.int64) + local.to(tl.int64) * NUM_RANKS * num_rows * ROW_BYTES
    out += local.to(tl.int64) * num_rows * HIDDEN
    slot_bytes = tl.cast(max_rows, tl.int64) * ROW_BYTES
    wait_for_inputs(OVERLAP)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        parity = tl.load(int32_at(space + turns + row * 4), volatile=True)
        for step in tl.static_range(1, NUM_RANKS):
            peer = (rank + step) % NUM_RANKS
            words = sent_words(load_words(parts_start + (peer * num_rows + row) * ROW_BYTES + lanes, wanted))
            slot = (parity * OTHERS + slot_of(rank, peer)).to(tl.int64)
            push_words(tl.load(table + peer) + slots + slot * slot_bytes + row * ROW_BYTES + lanes, wanted, words)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(row, tl.int64)
        turn = int32_at(space + turns + row * 4)
        parity = tl.load(turn, volatile=True)
        own = load_words(parts_start + (rank * num_rows + row) * ROW_BYTES + lanes, wanted)
        start = space + slots + (parity * OTHERS).to(tl.int64) * slot_bytes + row * ROW_BYTES
        summed = row_sum(own, start, slot_bytes, lanes, wanted, rank, NUM_RANKS, DTYPE, _TOGETHER, True)
        tl.store(out + row * HIDDEN + columns, summed, mask=inside)
        tl.debug_barrier()  # all warps have read the turn
        tl.store(turn, 1 - parity)


def gather_rows(
    x: Tensor, ids: Tensor, weights: Tensor, space: RowsSpace, held: range
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dist_infer.kernels.peer_rows.gather_rows`."""
    layout = space.layout
    num_rows, vectors = x.shape[-2], layout.row_bytes // 16
    results = tuple(y.new_empty(*y.shape[:-2], layout.num_ranks * num_rows, y.shape[-1]) for y in (x, ids, weights))
    block = triton.next_power_of_2(layout.packed_bytes // 16)
    gather_kernel[min(num_rows, space.max_programs), space.num_local](
        x,
        ids,
        weights,
        *results,
        space.memory,
        _memory_stride(space),
        space.table,
        space.rank,
        num_rows,
        layout.max_rows,
        layout.slots,
        held.start,
        held.stop,
        NUM_RANKS=layout.num_ranks,
        VECTORS=vectors,
        TOP_K=layout.top_k,
        BLOCK=block,
        num_warps=min(8, max(1, block // 64)),
        **overlapping(x),
    )
    return results[0], results[1], results[2]


def scatter_sums(parts: Tensor, space: RowsSpace) -> Tensor:
    """See `dist_infer.kernels.peer_rows.scatter_sums`."""
    layout = space.layout
    hidden = parts.shape[-1]
    num_rows = parts.shape[-2] // layout.num_ranks
    out = torch.empty(*parts.shape[:-2], num_rows, hidden, dtype=parts.dtype, device=parts.device)
    columns, num_warps = tile_of(hidden)
    per_vector = 16 // parts.element_size()
    scatter_kernel[min(num_rows, space.max_programs), space.num_local](
        parts,
        out,
        space.memory,
        _memory_stride(space),
        space.table,
        space.rank,
        num_rows,
        layout.max_rows,
        layout.parts,
        layout.back_turns,
        NUM_RANKS=layout.num_ranks,
        HIDDEN=hidden,
        VECTORS=hidden // per_vector,
        BLOCK=columns // per_vector,
        num_warps=num_warps,
        **overlapping(parts),
    )
    return out


def _memory_stride(space: RowsSpace) -> int:
    return 0 if space.memory.dim() == 1 else space.memory.stride(0)
