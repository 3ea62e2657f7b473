"""The all-reduce kernel of one shot; what it gives stands in kernels/all_reduce.py, its launch in all_reduce.py.

N ranks, T rows, D columns, V vectors of 16 bytes in a row.

Slower, between virtual ranks (benchmarks/virtual_ranks.py): one program a row, which keeps a multiprocessor busy longer
than a second sum over programs takes (8 ranks, one row: 5.4 us, not 2.9; the slots looked at one by one: 6.0); a first
look as soon as the row is sent, which is in vain (0.1 to 0.5 us); gains asked for with each row (0.2 us).
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.triton.peer_words import clear_quad, push_words
from dist_infer.kernels.triton.quantized_rows import data_alignment
from dist_infer.kernels.triton.reduced_rows import (
    CALL_SIZES,
    SHARE_BYTES,
    finish_row,
    first_loads,
    flip_turn,
    load_for,
    of_rank,
    own_words,
    row_sum,
    sent_words,
    slot_of,
    turn_of,
    zero_rest,
)
from dist_infer.kernels.triton.rms_norm import place_in_row


@triton.jit
def _push_row(words, places, row, part, rank, lanes, wanted, NUM_RANKS: tl.constexpr):
    """Write a row of this rank, or a part of one, into its slot of every peer."""
    space, table, slots, slot_bytes, row_stride = places
    parity = tl.load(turn_of(space, row) + part, volatile=True)
    for step in tl.static_range(1, NUM_RANKS):
        peer = (rank + step) % NUM_RANKS
        slot = parity * (NUM_RANKS - 1) + slot_of(rank, peer)
        push_words(tl.load(table + peer) + slots + slot * slot_bytes + row * row_stride + lanes, wanted, words)


@triton.jit(do_not_specialize=[*CALL_SIZES, "shares", "slots", "slot_bytes", "row_stride"])
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
    shares,
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
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Every rank writes its rows into all peers, where the data is its own flag, and adds up all rows itself.

    A row has two places in every slot, used in turn: a peer that is done with this call may write its next row while
    this rank still reads. It can't be two calls ahead, because it waits for this rank's row in each. The turn stands on
    the device, for each row, so calls may differ in size and be replayed from graphs. PARTS programs share a row where
    there are few: BLOCK is then the vectors of a part.
    """
    ROW_BYTES: tl.constexpr = VECTORS * 16
    PER_VECTOR: tl.constexpr = HIDDEN // VECTORS
    COLUMNS: tl.constexpr = BLOCK * PER_VECTOR
    CHUNK: tl.constexpr = 32 * PER_VECTOR
    part = tl.program_id(0) % PARTS
    vectors = place_in_row(tl.arange(0, BLOCK), part, 32, PARTS)
    lanes = vectors.to(tl.int64) * 16
    wanted = vectors < VECTORS
    columns = place_in_row(tl.arange(0, COLUMNS), part, CHUNK, PARTS)
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
    places = (space, table, slots, slot_bytes, row_stride)
    sources = (x, ids, factors, shared)
    follows = (residual, weight, total_out, norm_out, data, scales, scale)
    program = tl.program_id(0) // PARTS
    num_programs = tl.num_programs(0) // PARTS
    if AHEAD > 0:
        for step in tl.static_range(AHEAD):
            first = (program + step * num_programs).to(tl.int64)
            if first < num_rows:
                words = sent_words(own_words(sources, first_place + first, lanes, wanted, ROW_BYTES, 0, 0))
                _push_row(words, places, first, part, rank, lanes, wanted, NUM_RANKS)
    for number in range(program, num_rows, num_programs):
        row = tl.cast(number, tl.int64)
        place = first_place + row
        loaded = load_for(follows, gains, place, columns, inside, HIDDEN)
        if AHEAD > 0:
            ahead = row + AHEAD * num_programs
            if ahead < num_rows:
                words = sent_words(own_words(sources, first_place + ahead, lanes, wanted, ROW_BYTES, 0, 0))
                _push_row(words, places, ahead, part, rank, lanes, wanted, NUM_RANKS)
        own = sent_words(own_words(sources, place, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS))
        if AHEAD == 0:
            _push_row(own, places, row, part, rank, lanes, wanted, NUM_RANKS)
        turn = turn_of(space, row)
        # Read anew, which takes about as long as a row on its way: who looks earlier looks in vain, and waits longer.
        parity = tl.load(turn + part, volatile=True)
        start = space + slots + parity * (NUM_RANKS - 1) * slot_bytes + row * row_stride
        summed = row_sum(own, start, slot_bytes, lanes, wanted, rank, NUM_RANKS, x.dtype.element_ty, TOGETHER, True)
        quads = space + shares + row * SHARE_BYTES
        finish_row(
            summed, loaded, follows, place, row, columns, inside, eps, HIDDEN, COLUMNS, FORMAT,
            quads, part, CHUNK, PARTS,
        )  # fmt: skip
        tl.debug_barrier()  # all warps have read the turn, and what the parts have told each other
        if PARTS > 1 and weight is not None:
            clear_quad(quads + part * 16)
        flip_turn(turn, parity, part, PARTS)
    zero_rest(scales, num_rows, HIDDEN, FORMAT, ZEROING)
