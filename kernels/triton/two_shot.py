"""The all-reduce kernel of two shots; what it gives stands in kernels/all_reduce.py, its launch in all_reduce.py.

N ranks, T rows, D columns, V vectors of 16 bytes in a row.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl

from dist_infer.kernels.triton.peer_words import await_flag, peek_words, publish, push_words, unpack_row
from dist_infer.kernels.triton.quantized_rows import data_alignment
from dist_infer.kernels.triton.reduced_rows import (
    CALL_SIZES,
    finish_row,
    first_loads,
    int32_at,
    load_for,
    of_rank,
    own_words,
    row_sum,
    slot_of,
    zero_rest,
)


@triton.jit
def _first_row(rank, num_rows, NUM_RANKS: tl.constexpr):
    """Rows are dealt to the ranks contiguously, what is left over to the first ones."""
    return rank * (num_rows // NUM_RANKS) + tl.minimum(rank, num_rows % NUM_RANKS)


@triton.jit
def _next_epoch(space, counters, idx):
    """How often this tile has been used, with this call; the caller writes it back when all warps have read it."""
    counter = int32_at(space + counters + idx.to(tl.int64) * 4)
    return counter, tl.load(counter, volatile=True) + 1


@triton.jit(
    do_not_specialize=[*CALL_SIZES, "max_tiles", "flags", "counters", "parts", "part_bytes", "sums", "row_stride"]
)
def two_shot_kernel(
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
    max_tiles,
    flags,
    counters,
    parts,
    part_bytes,
    sums,
    row_stride,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROING: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each rank adds up its share of the rows and sends the sums to all; what follows is done as sums arrive.

    A flag covers a tile of ROWS rows and counts the calls that used it, so nothing is reset. No peer can write what
    this rank has yet to read: a peer writes the next call's rows only when all sums of this one have reached it, and
    the next call's sums only when this rank's next rows have.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    ROW_BYTES: tl.constexpr = VECTORS * 16
    COLUMNS: tl.constexpr = BLOCK * (HIDDEN // VECTORS)
    OTHERS: tl.constexpr = NUM_RANKS - 1
    lanes = tl.arange(0, BLOCK).to(tl.int64) * 16
    wanted = tl.arange(0, BLOCK) < VECTORS
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    gains = first_loads(weight, columns, inside, early, OVERLAP)
    local = tl.program_id(1)
    rank = first_rank + local
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    part_bytes = tl.cast(part_bytes, tl.int64)
    first_place = local.to(tl.int64) * num_rows
    if data is not None:
        data = of_rank(data, local, data_stride, data_alignment(FORMAT))
    if scales is not None:
        scales = of_rank(scales, local, scales_stride, 1)
    sources = (x, ids, factors, shared)
    follows = (residual, weight, total_out, norm_out, data, scales, scale)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)

    for step in tl.static_range(1, NUM_RANKS):
        peer = (rank + step) % NUM_RANKS
        peer_space = tl.load(table + peer)
        slot = slot_of(rank, peer)
        first = _first_row(peer, num_rows, NUM_RANKS)
        end = _first_row(peer + 1, num_rows, NUM_RANKS)
        for tile in range(program, tl.cdiv(end - first, ROWS), num_programs):
            counter, epoch = _next_epoch(space, counters, slot_of(peer, rank) * max_tiles + tile)
            for part_row in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, end - first)):
                place = first_place + (first + part_row)
                words = own_words(sources, place, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS)
                part = peer_space + parts + slot * part_bytes + tl.cast(part_row, tl.int64) * row_stride
                push_words(part + lanes, wanted, words)
            publish(peer_space + flags + (slot * max_tiles + tile).to(tl.int64) * 4, epoch)
            tl.store(counter, epoch)

    first = _first_row(rank, num_rows, NUM_RANKS)
    end = _first_row(rank + 1, num_rows, NUM_RANKS)
    for tile in range(program, tl.cdiv(end - first, ROWS), num_programs):
        counter, epoch = _next_epoch(space, counters, 2 * OTHERS * max_tiles + tile)
        for source in tl.static_range(OTHERS):
            await_flag(space + flags + (source * max_tiles + tile).to(tl.int64) * 4, epoch)
        for part_row in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, end - first)):
            row = (first + part_row).to(tl.int64)
            place = first_place + row
            loaded = load_for(follows, gains, place, columns, inside, HIDDEN)
            words = own_words(sources, place, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS)
            start = space + parts + tl.cast(part_row, tl.int64) * row_stride
            summed = row_sum(words, start, part_bytes, lanes, wanted, rank, NUM_RANKS, DTYPE, TOGETHER, False)
            for step in tl.static_range(1, NUM_RANKS):
                peer = (rank + step) % NUM_RANKS
                peer_row = (tl.load(table + peer) + sums + row * row_stride).to(tl.pointer_type(DTYPE))
                tl.store(tl.multiple_of(peer_row, 16) + columns, summed, mask=inside)
            finish_row(summed, loaded, follows, place, row, columns, inside, eps, HIDDEN, COLUMNS, FORMAT)
        for step in tl.static_range(1, NUM_RANKS):
            peer = (rank + step) % NUM_RANKS
            flag = (OTHERS + slot_of(rank, peer)) * max_tiles + tile
            publish(tl.load(table + peer) + flags + flag.to(tl.int64) * 4, epoch)
        tl.store(counter, epoch)

    for step in tl.static_range(1, NUM_RANKS):
        peer = (rank + step) % NUM_RANKS
        slot = OTHERS + slot_of(peer, rank)
        first = _first_row(peer, num_rows, NUM_RANKS)
        end = _first_row(peer + 1, num_rows, NUM_RANKS)
        for tile in range(program, tl.cdiv(end - first, ROWS), num_programs):
            counter, epoch = _next_epoch(space, counters, slot * max_tiles + tile)
            await_flag(space + flags + (slot * max_tiles + tile).to(tl.int64) * 4, epoch)
            for tile_row in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, end - first)):
                row = (first + tile_row).to(tl.int64)
                place = first_place + row
                loaded = load_for(follows, gains, place, columns, inside, HIDDEN)
                words = peek_words(space + sums + row * row_stride + lanes, wanted)
                summed = unpack_row(words, DTYPE).to(DTYPE)
                finish_row(summed, loaded, follows, place, row, columns, inside, eps, HIDDEN, COLUMNS, FORMAT)
            tl.store(counter, epoch)
    zero_rest(scales, num_rows, HIDDEN, FORMAT, ZEROING)
