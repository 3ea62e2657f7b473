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

from dist_infer.kernels import all_reduce
from dist_infer.kernels.triton.dependent_launch import wait_for_inputs
from dist_infer.kernels.triton.moe_finalize import finalized_words
from dist_infer.kernels.triton.number_formats import zero_invented_rows
from dist_infer.kernels.triton.peer_words import (
    clear_words,
    load_words,
    peek_words,
    sendable,
    settle_words,
    share_squares,
    unpack_row,
)
from dist_infer.kernels.triton.quantized_rows import load_scale, store_row_in_place
from dist_infer.kernels.triton.rms_norm import scale_of_squares

SHARE_BYTES = tl.constexpr(all_reduce.SHARE_BYTES)
TURN_BYTES = tl.constexpr(all_reduce.TURN_BYTES)
# Arguments of the kernels that differ from call to call.
CALL_SIZES = ("data_stride", "scales_stride", "memory_stride", "first_rank", "num_rows", "early")

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_MOVE = tl.constexpr("mov.b32 $0, $1;")


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
def in_place(values):
    """`values`, of which nothing is made before this place is reached."""
    if _INTERPRETED:
        kept = values
    elif values.dtype.primitive_bitwidth == 32:
        kept = tl.inline_asm_elementwise(_MOVE, "=r,r", [values], dtype=values.dtype, is_pure=False, pack=1)
    else:
        kept = tl.inline_asm_elementwise(_MOVE, "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2)
    return kept


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
def slot_of(source, owner):
    """The place of a rank among the others of `owner`."""
    return tl.where(source < owner, source, source - 1)


@triton.jit
def int32_at(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def turn_of(space, row):
    """The words that say which of its two places a row has in this call."""
    return int32_at(space + row * TURN_BYTES)


@triton.jit
def flip_turn(turn, parity, part, PARTS: tl.constexpr):
    """The other turn for the next call, when all threads have read this one: the words of this part of PARTS.

    There is a word for each of the parts that a row may have, so that none waits for another; all change in each call.
    """
    word = tl.arange(0, 4)
    tl.store(turn + word, 1 - parity + word * 0, mask=word % PARTS == part)


@triton.jit
def _words_of_slots(start, slot_bytes, lanes, wanted, first: tl.constexpr, COUNT: tl.constexpr, SETTLE: tl.constexpr):
    """The words of COUNT slots, four of each."""
    addresses = ()
    words = ()
    for idx in tl.static_range(COUNT):
        address = start + (first + idx) * slot_bytes + lanes
        addresses += (address,)  # type: ignore[assignment]
        words += peek_words(address, wanted)
    if SETTLE:
        words = settle_words(addresses, words, COUNT)
        for idx in tl.static_range(COUNT):
            clear_words(addresses[idx], wanted)
    return words


@triton.jit
def _quad_of(words, idx: tl.constexpr):
    return words[4 * idx], words[4 * idx + 1], words[4 * idx + 2], words[4 * idx + 3]


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
    TOGETHER: tl.constexpr,
    SETTLE: tl.constexpr,
):
    """The sum over the ranks in rank order, from +0.0, rounded once.

    `start` is the row in the first slot: the others' rows stand in slots in rank order, the own row isn't there and
    comes behind the slot of the rank before it; of the first two ranks either may come first. TOGETHER slots are asked
    for at once. With SETTLE the words are their own flags, and what has been read is marked as empty for a later call.
    """
    OTHERS: tl.constexpr = NUM_RANKS - 1
    behind = 1 if NUM_RANKS == 2 else tl.maximum(rank, 1)
    own_row = unpack_row(own, DTYPE)
    total = tl.zeros_like(own_row)
    for first in tl.static_range(0, OTHERS, TOGETHER):
        words = _words_of_slots(start, slot_bytes, lanes, wanted, first, min(TOGETHER, OTHERS - first), SETTLE)
        for slot in tl.static_range(first, min(first + TOGETHER, OTHERS)):
            total += unpack_row(_quad_of(words, slot - first), DTYPE)
            if slot + 1 == behind:
                total += own_row
    return total.to(DTYPE)


@triton.jit
def load_for(follows, gains, place, columns, inside, HIDDEN: tl.constexpr):
    """What follows the sum of a row: the residual, the gains, the scale.

    Asked for before the row is sent: behind what goes over the wire they would come late. The scale for each row anew,
    and the gains as if: else what is made of them alone would be made before the first row is sent, which would wait.
    """
    residual, weight, _, _, _, _, scale = follows
    added = 0.0
    if residual is not None:
        added = tl.load(residual + place * HIDDEN + columns, mask=inside, other=0.0)
    if weight is not None:
        gains = in_place(gains)
    return added, gains, load_scale(scale)


@triton.jit
def _laid_out_as(row, loaded):
    """`row` unchanged, spread over the threads as `loaded` is, so that its squares are added in the promised order.

    It has a 0 added to its bits that comes from `loaded`, as only the last compiler pass can see.
    """
    UNSIGNED: tl.constexpr = tl.uint32 if row.dtype.primitive_bitwidth == 32 else tl.uint16
    zero = (loaded.to(tl.float32).to(tl.uint32, bitcast=True) << 1) & 1
    return (row.to(UNSIGNED, bitcast=True) | zero.to(UNSIGNED)).to(row.dtype, bitcast=True)


@triton.jit
def finish_row(
    summed,
    loaded,
    follows,
    place,
    row,
    columns,
    inside,
    eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    shares=0,
    part=0,
    CHUNK: tl.constexpr = 0,
    PARTS: tl.constexpr = 1,
):
    """What follows the sum of a row or a part of one; every step reads what the one before it has rounded.

    `loaded` is of load_for; `shares`: where the parts of the row tell each other their sums of squares.
    """
    residual, weight, total_out, norm_out, data, scales, _ = follows
    added, gains, scale = loaded
    total = summed
    if residual is not None:
        total = (summed.to(tl.float32) + added.to(tl.float32)).to(summed.dtype)
    tl.store(total_out + place * HIDDEN + columns, total, mask=inside)
    if weight is not None:
        wide = _laid_out_as(total, gains).to(tl.float32)
        squares = tl.sum(wide * wide, 0)
        if PARTS > 1:
            squares = share_squares(shares, squares, part, PARTS)
        normed = wide * scale_of_squares(squares, eps, HIDDEN) * gains.to(tl.float32)
        if norm_out is not None:
            tl.store(norm_out + place * HIDDEN + columns, normed.to(total.dtype), mask=inside)
        if FORMAT is not None:
            store_row_in_place(
                normed, row, data, scales, scale, HIDDEN, FORMAT, COLUMNS, total.dtype, part, CHUNK, PARTS
            )


@triton.jit
def zero_rest(scales, num_rows, HIDDEN: tl.constexpr, FORMAT: tl.constexpr, ZEROING: tl.constexpr):
    """Scales of rows that don't exist, by the last programs: the first ones have most rows."""
    if ZEROING > 0:
        for group in range(tl.num_programs(0) - 1 - tl.program_id(0), ZEROING, tl.num_programs(0)):
            zero_invented_rows(scales, num_rows, group, HIDDEN, FORMAT)
