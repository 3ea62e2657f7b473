"""The all-reduce kernel of one shot; what it gives stands in kernels/all_reduce.py, its launch in all_reduce.py.

N ranks, T rows, D columns, V vectors of 16 bytes in a row.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.triton.peer_words import push_words
from dist_infer.kernels.triton.quantized_rows import data_alignment, load_scale
from dist_infer.kernels.triton.reduced_rows import (
    CALL_SIZES,
    finish_row,
    first_loads,
    int32_at,
    load_residual,
    of_rank,
    own_words,
    row_sum,
    sent_words,
    slot_of,
    zero_rest,
)


@triton.jit
def _push_row(
    words,
    table,
    space,
    slots,
    slot_bytes,
    row_stride,
    row,
    rank,
    lanes,
    wanted,
    NUM_RANKS: tl.constexpr,
):
    """Write a row of this rank into its slot of every peer."""
    parity = tl.load(int32_at(space + row * 4), volatile=True)
    for step in tl.static_range(1, NUM_RANKS):
        peer = (rank + step) % NUM_RANKS
        slot = parity * (NUM_RANKS - 1) + slot_of(rank, peer)
        push_words(tl.load(table + peer) + slots + slot * slot_bytes + row * row_stride + lanes, wanted, words)


@triton.jit(do_not_specialize=[*CALL_SIZES, "slots", "slot_bytes", "row_stride"])
def one_shot_kernel(
    x,
    ids,
    factors,
    shared,
    residual,
    weight,
    total_out,
    norm_out,
    data,
    scales,
    scale,
    data_stride,
    scales_stride,
    memory,
    memory_stride,
    table,
    first_rank,
    num_rows,
    early,
    eps,
    slots,
    slot_bytes,
    row_stride,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROING: tl.constexpr,
    AHEAD: tl.constexpr,
    PEEK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Every rank writes its rows into all peers, where the data is its own flag, and adds up all rows itself.

    A row has two places in every slot, used in turn: a peer that is done with this call may write its next row while
    this rank still reads. It can't be two calls ahead, because it waits for this rank's row in each. The turn stands on
    the device, for each row, so calls may differ in size and be replayed from graphs.
    """
    ROW_BYTES: tl.constexpr = VECTORS * 16
    COLUMNS: tl.constexpr = BLOCK * (HIDDEN // VECTORS)
    lanes = tl.arange(0, BLOCK).to(tl.int64) * 16
    wanted = tl.arange(0, BLOCK) < VECTORS
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    gains = first_loads(weight, columns, inside, early, OVERLAP)
    local = tl.program_id(1)
    rank = first_rank + local
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    slot_bytes = tl.cast(slot_bytes, tl.int64)
    first_place = local.to(tl.int64) * num_rows
    if data is not None:
        data = of_rank(data, local, data_stride, data_alignment(FORMAT))
    if scales is not None:
        scales = of_rank(scales, local, scales_stride, 1)
    sources = (x, ids, factors, shared)
    follows = (residual, weight, total_out, norm_out, data, scales, load_scale(scale))
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if AHEAD > 0:
        for turn in tl.static_range(AHEAD):
            first = (program + turn * num_programs).to(tl.int64)
            if first < num_rows:
                words = sent_words(own_words(sources, first_place + first, lanes, wanted, ROW_BYTES, 0, 0))
                _push_row(words, table, space, slots, slot_bytes, row_stride, first, rank, lanes, wanted, NUM_RANKS)
    for number in range(program, num_rows, num_programs):
        row = tl.cast(number, tl.int64)
        place = first_place + row
        # Asked for first: behind what goes over the wire it would come late.
        added = load_residual(residual, place, columns, inside, HIDDEN)
        if AHEAD > 0:
            ahead = row + AHEAD * num_programs
            if ahead < num_rows:
                words = sent_words(own_words(sources, first_place + ahead, lanes, wanted, ROW_BYTES, 0, 0))
                _push_row(words, table, space, slots, slot_bytes, row_stride, ahead, rank, lanes, wanted, NUM_RANKS)
        own = sent_words(own_words(sources, place, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS))
        if AHEAD == 0:
            _push_row(own, table, space, slots, slot_bytes, row_stride, row, rank, lanes, wanted, NUM_RANKS)
        turn_of_row = int32_at(space + row * 4)
        parity = tl.load(turn_of_row, volatile=True)
        start = space + slots + parity * (NUM_RANKS - 1) * slot_bytes + row * row_stride
        summed = row_sum(own, start, slot_bytes, lanes, wanted, rank, NUM_RANKS, x.dtype.element_ty, PEEK, True)
        finish_row(summed, added, gains, follows, place, row, columns, inside, eps, HIDDEN, COLUMNS, FORMAT)
        tl.debug_barrier()  # all warps have read the turn
        tl.store(turn_of_row, 1 - parity)
    zero_rest(scales, num_rows, HIDDEN, FORMAT, ZEROING)
