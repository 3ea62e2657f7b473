"""Device functions of an all-reduce through peer memory: the sum of a row over the ranks, and what follows it.

A row is spread over the threads of a program in vectors of 16 bytes. N ranks. What goes through several functions is
a tuple:

    sources  x, ids, factors, shared: rows of this launch's ranks, or outputs of experts to be added up to such rows
    follows  residual, weight, total_out, norm_out, data, scales, scale: what follows the sum, and where it goes

The rows of the ranks of a launch stand one behind the other, so a row has a number among them, its place. Only data and
scales of the quantised norm are those of one rank.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from dist_infer.kernels.triton.dependent_launch import wait_for_inputs
from dist_infer.kernels.triton.moe_finalize import finalized_words
from dist_infer.kernels.triton.number_formats import zero_invented_rows
from dist_infer.kernels.triton.peer_words import clear_words, load_words, peek_words, sendable, settle_words, unpack_row
from dist_infer.kernels.triton.quantized_rows import store_row_in_place
from dist_infer.kernels.triton.rms_norm import row_scale

# Arguments of the kernels that differ from call to call.
CALL_SIZES = ("data_stride", "scales_stride", "memory_stride", "first_rank", "num_rows", "early")


@triton.jit
def first_loads(weight, columns, inside, early, OVERLAP: tl.constexpr):
    """The gains of a norm, read before the inputs are waited for where that is allowed."""
    if OVERLAP and early == 0:
        gdc_wait()
    gains = 0.0
    if weight is not None:
        gains = tl.load(weight + columns, mask=inside, other=0)
    wait_for_inputs(OVERLAP)
    return gains


@triton.jit
def of_rank(matrix, local, stride, ALIGNMENT: tl.constexpr):
    """What a rank of the launch has of matrices that stand one behind the other."""
    return tl.multiple_of(matrix + local.to(tl.int64) * stride, ALIGNMENT)


@triton.jit
def own_words(sources, place, lanes, wanted, ROW_BYTES: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """A row of this rank: as it is, or the sum over its experts."""
    x, ids, factors, shared = sources
    if TOP_K == 0:
        words = load_words(x.to(tl.int64) + place * ROW_BYTES + lanes, wanted)
    else:
        if shared is not None:
            shared = shared.to(tl.int64)
        words = finalized_words(
            x.to(tl.int64),
            ids,
            factors,
            shared,
            place,
            lanes,
            wanted,
            ROW_BYTES,
            TOP_K,
            NUM_EXPERTS,
            x.dtype.element_ty,
        )
    return words


@triton.jit
def sent_words(words):
    """A row of this rank as its peers get it."""
    return sendable(words[0]), sendable(words[1]), sendable(words[2]), sendable(words[3])


@triton.jit
def _chosen(first, condition, second):
    """Word by word."""
    return (
        tl.where(condition, first[0], second[0]),
        tl.where(condition, first[1], second[1]),
        tl.where(condition, first[2], second[2]),
        tl.where(condition, first[3], second[3]),
    )


@triton.jit
def slot_of(source, owner):
    """The place of a rank among the others of `owner`."""
    return tl.where(source < owner, source, source - 1)


@triton.jit
def int32_at(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def row_sum(
    own,
    start,
    slot_bytes,
    lanes,
    wanted,
    rank,
    NUM_RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    PEEK: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """The sum over the ranks in rank order, from +0.0, rounded once.

    `start` is the row in the first slot: the others' rows stand in slots in rank order, the own row isn't there. With
    SETTLE the words are their own flags, and what has been read is marked as empty for a later call.
    """
    peeked = ()
    if PEEK:
        for slot in tl.static_range(NUM_RANKS - 1):
            peeked += (peek_words(start + slot * slot_bytes + lanes, wanted),)  # type: ignore[assignment]
    total = tl.zeros_like(unpack_row(own, DTYPE))
    previous = own
    for source in tl.static_range(NUM_RANKS):
        words = own
        if source > 0:
            words = _chosen(previous, source > rank, words)
        if source < NUM_RANKS - 1:
            address = start + source * slot_bytes + lanes
            current = peeked[source] if PEEK else peek_words(address, wanted)
            if SETTLE:
                current = settle_words(address, current)
                clear_words(address, wanted)
            words = _chosen(current, source < rank, words)
            previous = current
        total += unpack_row(words, DTYPE)
    return total.to(DTYPE)


@triton.jit
def load_residual(residual, place, columns, inside, HIDDEN: tl.constexpr):
    added = 0.0
    if residual is not None:
        added = tl.load(residual + place * HIDDEN + columns, mask=inside, other=0.0)
    return added


@triton.jit
def _laid_out_as(row, loaded):
    """`row` unchanged, spread over the threads as `loaded` is, so that row_scale adds in its promised order.

    It has a 0 added to its bits that comes from `loaded`, as only the last compiler pass can see.
    """
    UNSIGNED: tl.constexpr = tl.uint32 if row.dtype.primitive_bitwidth == 32 else tl.uint16
    zero = (loaded.to(tl.float32).to(tl.uint32, bitcast=True) << 1) & 1
    return (row.to(UNSIGNED, bitcast=True) | zero.to(UNSIGNED)).to(row.dtype, bitcast=True)


@triton.jit
def finish_row(
    summed,
    added,
    gains,
    follows,
    place,
    row,
    columns,
    inside,
    eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """What follows the sum of a row; every step reads what the one before it has rounded."""
    residual, weight, total_out, norm_out, data, scales, scale = follows
    total = summed
    if residual is not None:
        total = (summed.to(tl.float32) + added.to(tl.float32)).to(summed.dtype)
    tl.store(total_out + place * HIDDEN + columns, total, mask=inside)
    if weight is not None:
        wide = _laid_out_as(total, gains).to(tl.float32)
        normed = wide * row_scale(wide, eps, HIDDEN) * gains.to(tl.float32)
        if norm_out is not None:
            tl.store(norm_out + place * HIDDEN + columns, normed.to(total.dtype), mask=inside)
        if FORMAT is not None:
            store_row_in_place(normed, row, data, scales, scale, HIDDEN, FORMAT, COLUMNS, total.dtype)


@triton.jit
def zero_rest(scales, num_rows, HIDDEN: tl.constexpr, FORMAT: tl.constexpr, ZEROING: tl.constexpr):
    """Scales of rows that don't exist, by the last programs: the first ones have most rows."""
    if ZEROING > 0:
        for group in range(tl.num_programs(0) - 1 - tl.program_id(0), ZEROING, tl.num_programs(0)):
            zero_invented_rows(scales, num_rows, group, HIDDEN, FORMAT)
