"""The all-reduce kernel of one shot; what it gives stands in kernels/all_reduce.py, its launch in all_reduce.py.

N ranks, T rows, D columns, V vectors of 16 bytes in a row.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dist_infer.kernels.triton.dependent_launch import wait_for_inputs
from dist_infer.kernels.triton.peer_words import load_words, push_words
from dist_infer.kernels.triton.quantized_rows import data_alignment, load_scale
from dist_infer.kernels.triton.reduced_rows import (
    CALL_SIZES,
    finish_row,
    int32_at,
    load_residual,
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
    DTYPE: tl.constexpr = x.dtype.element_ty
    ROW_BYTES: tl.constexpr = VECTORS * 16
    COLUMNS: tl.constexpr = BLOCK * (HIDDEN // VECTORS)
    lanes = tl.arange(0, BLOCK).to(tl.int64) * 16
    wanted = tl.arange(0, BLOCK) < VECTORS
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    if OVERLAP and early == 0:
        gdc_wait()
    gains = 0.0
    if weight is not None:
        gains = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    local = tl.program_id(1)
    rank = first_rank + local
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    slot_bytes = tl.cast(slot_bytes, tl.int64)
    first_element = local.to(tl.int64) * num_rows * HIDDEN
    x_start = (x + first_element * (TOP_K if TOP_K > 0 else 1)).to(tl.int64)
    if TOP_K > 0:
        ids += local.to(tl.int64) * num_rows * TOP_K
        factors += local.to(tl.int64) * num_rows * TOP_K
        if shared is not None:
            shared = (shared + first_element).to(tl.int64)
    total_out += first_element
    if residual is not None:
        residual += first_element
    if norm_out is not None:
        norm_out += first_element
    if data is not None:
        data = tl.multiple_of(data + local.to(tl.int64) * data_stride, data_alignment(FORMAT))
    if scales is not None:
        scales += local.to(tl.int64) * scales_stride
    scale = load_scale(scale)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if AHEAD > 0:
        for turn in tl.static_range(AHEAD):
            first = (program + turn * num_programs).to(tl.int64)
            if first < num_rows:
                words = sent_words(load_words(x_start + first * ROW_BYTES + lanes, wanted))
                _push_row(words, table, space, slots, slot_bytes, row_stride, first, rank, lanes, wanted, NUM_RANKS)
    for number in range(program, num_rows, num_programs):
        row = tl.cast(number, tl.int64)
        # Asked for first: behind what goes over the wire it would come late.
        added = load_residual(residual, row, columns, inside, HIDDEN)
        if AHEAD > 0:
            ahead = row + AHEAD * num_programs
            if ahead < num_rows:
                words = sent_words(load_words(x_start + ahead * ROW_BYTES + lanes, wanted))
                _push_row(words, table, space, slots, slot_bytes, row_stride, ahead, rank, lanes, wanted, NUM_RANKS)
        own = sent_words(
            own_words(x_start, ids, factors, shared, row, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS, DTYPE)
        )
        if AHEAD == 0:
            _push_row(own, table, space, slots, slot_bytes, row_stride, row, rank, lanes, wanted, NUM_RANKS)
        turn_of_row = int32_at(space + row * 4)
        parity = tl.load(turn_of_row, volatile=True)
        start = space + slots + parity * (NUM_RANKS - 1) * slot_bytes + row * row_stride
        summed = row_sum(own, start, slot_bytes, lanes, wanted, rank, NUM_RANKS, DTYPE, PEEK, True)
        finish_row(
            summed,
            added,
            gains,
            residual,
            weight,
            total_out,
            norm_out,
            data,
            scales,
            scale,
            row,
            columns,
            inside,
            eps,
            HIDDEN,
            COLUMNS,
            FORMAT,
        )
        tl.debug_barrier()  # all warps have read the turn
        tl.store(turn_of_row, 1 - parity)
    zero_rest(scales, num_rows, HIDDEN, FORMAT, ZEROING)
