"""All-reduce over peer memory with what follows it, in one kernel; the contract stands in kernels/all_reduce.py.

A program takes whole rows. N ranks, T rows, D columns, V vectors of 16 bytes in a row.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from dist_infer.kernels.all_reduce import Epilogue, PeerSpace, Reduced, empty_reduced
from dist_infer.kernels.carriers import ExpertOutputs, Fp8Scaling, Fp8Tensor, Nvfp4Tensor
from dist_infer.kernels.triton.dependent_launch import may_read_early, overlapping, wait_for_inputs
from dist_infer.kernels.triton.moe_finalize import finalized_words
from dist_infer.kernels.triton.number_formats import num_zeroing_programs
from dist_infer.kernels.triton.peer_words import await_flag, load_words, peek_words, publish, push_words, unpack_row
from dist_infer.kernels.triton.quantize import kernel_format
from dist_infer.kernels.triton.quantized_rows import data_alignment, load_scale
from dist_infer.kernels.triton.reduced_rows import (
    finish_row,
    int32_at,
    load_residual,
    row_sum,
    sent_words,
    slot_of,
    zero_rest,
)
from dist_infer.kernels.triton.rms_norm import tile_of

_AHEAD = 1  # rows that a program has sent before it reads the first, where it has several
_MAX_PEEKED = 8  # vectors of a thread that it asks for before it waits for the first
_MAX_TILE = 4
# What differs from call to call.
_SIZES = ("data_stride", "scales_stride", "memory_stride", "first_rank", "num_rows", "early")
_NUM_SMS = 128  # roughly: what a tile is made for


@triton.jit
def _own_words(
    x_start,
    ids,
    factors,
    shared,
    row,
    lanes,
    wanted,
    ROW_BYTES: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """A row of this rank: as it is, or the sum over its experts."""
    if TOP_K == 0:
        words = load_words(x_start + row * ROW_BYTES + lanes, wanted)
    else:
        words = finalized_words(x_start, ids, factors, shared, row, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS, DTYPE)
    return words


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


@triton.jit(do_not_specialize=[*_SIZES, "slots", "slot_bytes", "row_stride"])
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
            _own_words(x_start, ids, factors, shared, row, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS, DTYPE)
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


@triton.jit
def _first_row(rank, num_rows, NUM_RANKS: tl.constexpr):
    """Rows are dealt to the ranks contiguously, what is left over to the first ones."""
    return rank * (num_rows // NUM_RANKS) + tl.minimum(rank, num_rows % NUM_RANKS)


@triton.jit
def _next_epoch(space, counters, idx):
    """How often this tile has been used, with this call; the caller writes it back when all warps have read it."""
    counter = int32_at(space + counters + idx.to(tl.int64) * 4)
    return counter, tl.load(counter, volatile=True) + 1


@triton.jit(do_not_specialize=[*_SIZES, "max_tiles", "flags", "counters", "parts", "part_bytes", "sums", "row_stride"])
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
    PEEK: tl.constexpr,
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
    if OVERLAP and early == 0:
        gdc_wait()
    gains = 0.0
    if weight is not None:
        gains = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    local = tl.program_id(1)
    rank = first_rank + local
    space = memory.to(tl.int64) + local.to(tl.int64) * memory_stride
    part_bytes = tl.cast(part_bytes, tl.int64)
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

    for step in tl.static_range(1, NUM_RANKS):
        peer = (rank + step) % NUM_RANKS
        peer_space = tl.load(table + peer)
        slot = slot_of(rank, peer)
        first = _first_row(peer, num_rows, NUM_RANKS)
        end = _first_row(peer + 1, num_rows, NUM_RANKS)
        for tile in range(program, tl.cdiv(end - first, ROWS), num_programs):
            counter, epoch = _next_epoch(space, counters, slot_of(peer, rank) * max_tiles + tile)
            for part_row in range(tile * ROWS, tl.minimum(tile * ROWS + ROWS, end - first)):
                row = (first + part_row).to(tl.int64)
                words = _own_words(
                    x_start, ids, factors, shared, row, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS, DTYPE
                )
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
            added = load_residual(residual, row, columns, inside, HIDDEN)
            words = _own_words(x_start, ids, factors, shared, row, lanes, wanted, ROW_BYTES, TOP_K, NUM_EXPERTS, DTYPE)
            start = space + parts + tl.cast(part_row, tl.int64) * row_stride
            summed = row_sum(words, start, part_bytes, lanes, wanted, rank, NUM_RANKS, DTYPE, PEEK, False)
            for step in tl.static_range(1, NUM_RANKS):
                peer = (rank + step) % NUM_RANKS
                peer_row = (tl.load(table + peer) + sums + row * row_stride).to(tl.pointer_type(DTYPE))
                tl.store(tl.multiple_of(peer_row, 16) + columns, summed, mask=inside)
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
                added = load_residual(residual, row, columns, inside, HIDDEN)
                words = peek_words(space + sums + row * row_stride + lanes, wanted)
                finish_row(
                    unpack_row(words, DTYPE).to(DTYPE),
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
            tl.store(counter, epoch)
    zero_rest(scales, num_rows, HIDDEN, FORMAT, ZEROING)


def one_shot(x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace) -> Reduced:
    """See `dist_infer.kernels.all_reduce.one_shot`."""
    reduced = empty_reduced(x, epilogue)
    num_rows = x.shape[-2]
    if num_rows == 0:
        return reduced
    arguments, constants, options = _common(x, epilogue, space, reduced)
    layout = space.layout
    num_programs = _even_programs(num_rows, space.max_programs) + constants["ZEROING"]
    num_programs = min(num_programs, space.max_programs)
    one_shot_kernel[num_programs, space.num_local](
        *arguments,
        layout.slots,
        layout.slot_bytes,
        layout.row_bytes,
        **constants,
        AHEAD=_AHEAD if num_rows > num_programs and isinstance(x, Tensor) else 0,
        **options,
    )
    return reduced


def two_shot(x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace) -> Reduced:
    """See `dist_infer.kernels.all_reduce.two_shot`."""
    reduced = empty_reduced(x, epilogue)
    num_rows = x.shape[-2]
    if num_rows == 0:
        return reduced
    arguments, constants, options = _common(x, epilogue, space, reduced)
    layout = space.layout
    # Flags are found by tile, so the rows of a tile depend on what all ranks know alike.
    share = triton.cdiv(num_rows, layout.num_ranks)
    rows = min(_MAX_TILE, triton.next_power_of_2(triton.cdiv(share, _NUM_SMS)))
    num_programs = min(num_rows + constants["ZEROING"], space.max_programs)
    two_shot_kernel[num_programs, space.num_local](
        *arguments,
        layout.max_tiles,
        layout.flags,
        layout.counters,
        layout.parts,
        layout.part_bytes,
        layout.sums,
        layout.row_bytes,
        **constants,
        ROWS=rows,
        **options,
    )
    return reduced


def _even_programs(num_rows: int, max_programs: int) -> int:
    """Programs that get equally many rows, or nearly."""
    return -(-num_rows // -(-num_rows // max_programs))


def _common(
    x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace, reduced: Reduced
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """The first arguments of both kernels, their constants, and how they are launched."""
    num_rows, hidden = x.shape[-2:]
    columns, num_warps = tile_of(hidden)
    rows = reduced.total
    per_vector = 16 // rows.element_size()
    data = scales = scale = None
    data_stride = scales_stride = zeroing = 0
    quant_format = None
    if reduced.quantized:
        first = reduced.quantized[0]
        quant_format, block, swizzled = kernel_format(first)
        data, data_stride = first.data, first.data.numel()
        if isinstance(first, Fp8Tensor) and first.scaling is Fp8Scaling.TENSOR:
            scale = first.scales
        else:
            scales, scales_stride = first.scales, first.scales.numel()
            scale = first.global_scale if isinstance(first, Nvfp4Tensor) else None
            zeroing = num_zeroing_programs(num_rows, hidden // block, swizzled=swizzled)
    memory_stride = 0 if space.memory.dim() == 1 else space.memory.stride(0)
    sources: tuple[Tensor | None, ...]
    sources = (x, None, None, None) if isinstance(x, Tensor) else (x.outputs, x.ids, x.weights, x.shared)
    arguments: list[Any] = [*sources, epilogue.residual, epilogue.weight, reduced.total, reduced.normed]
    arguments += [data, scales, scale, data_stride, scales_stride, space.memory, memory_stride]
    arguments += [space.table, space.rank, num_rows, int(may_read_early(rows)), epilogue.eps]
    num_ranks = space.layout.num_ranks
    vectors_a_thread = triton.cdiv(columns // per_vector, 32 * num_warps)
    constants = {
        "NUM_RANKS": num_ranks,
        "HIDDEN": hidden,
        "VECTORS": hidden // per_vector,
        "BLOCK": columns // per_vector,
        "TOP_K": 0 if isinstance(x, Tensor) else x.ids.shape[-1],
        "NUM_EXPERTS": 0 if isinstance(x, Tensor) else x.num_experts,
        "FORMAT": quant_format,
        "ZEROING": zeroing,
        "PEEK": vectors_a_thread * (num_ranks - 1) <= _MAX_PEEKED,
    }
    return arguments, constants, {"num_warps": num_warps, **overlapping(rows, alone=not space.shares_device)}
