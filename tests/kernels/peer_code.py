"""Device code for tests of kernels/triton/all_reduce: its arithmetic alone, faults, delays, ranks on one device."""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from dist_infer.kernels.triton.peer_words import load_words, peek_words, sendable, unpack_row
from dist_infer.kernels.triton.reduced_rows import finish_row, load_for
from dist_infer.kernels.triton.rms_norm import place_in_row


@triton.jit
def finish_rows(
    summed,
    residual,
    weight,
    total_out,
    norm_out,
    data,
    scales,
    scale,
    eps,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """What follows the sum, of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    values = tl.load(summed + row * HIDDEN + columns, mask=inside, other=0)
    follows = (residual, weight, total_out, norm_out, data, scales, scale)
    gains = tl.load(weight + columns, mask=inside, other=0)
    loaded = load_for(follows, gains, row, columns, inside, HIDDEN)
    finish_row(values, loaded, follows, row, row, columns, inside, eps, HIDDEN, COLUMNS, FORMAT)


@triton.jit
def unpack_words(words, out, VECTORS: tl.constexpr):
    """Rows of words to float32."""
    four = tl.arange(0, VECTORS) * 4
    quad = (tl.load(words + four), tl.load(words + four + 1), tl.load(words + four + 2), tl.load(words + four + 3))
    row = unpack_row(quad, out.dtype.element_ty)
    tl.store(out + tl.arange(0, row.numel), row)


@triton.jit
def make_sendable(words, out, LENGTH: tl.constexpr):
    """Words as they are sent."""
    at = tl.arange(0, LENGTH)
    tl.store(out + at, sendable(tl.load(words + at)))


@triton.jit
def place_parts(out, LENGTH: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr):
    """The places of a part a program."""
    at, part = tl.arange(0, LENGTH), tl.program_id(0)
    tl.store(out + part * LENGTH + at, place_in_row(at, part, CHUNK, PARTS))


@triton.jit
def _dawdle():
    """One time in a hundred, some microseconds, as a rank does whose host was late."""
    tl.inline_asm_elementwise(
        """
{
.reg .u64 now;
.reg .u32 low;
.reg .pred late;
mov.u64 now, %globaltimer;
cvt.u32.u64 low, now;
shr.u32 low, low, 5;
rem.u32 low, low, 100;
setp.eq.u32 late, low, 0;
@late nanosleep.u32 20000;
mov.u32 $0, low;
}""",
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def dawdling_load(address, wanted):
    """load_words, now and then late."""
    _dawdle()
    return load_words(address, wanted)


@triton.jit
def hasty_settle(addresses, words, COUNT: tl.constexpr):
    """settle_words that takes what it finds."""
    return words


@triton.jit
def hasty_quad(address):
    """await_quad that takes what it finds."""
    return peek_words(address, address != 0)


@triton.jit
def deaf_await(address, value):
    """await_flag that doesn't wait."""
    tl.debug_barrier()


@triton.jit
def late_load(address, wanted):
    """load_words of a rank that comes long after the others: the one with the odd program number."""
    if tl.program_id(1) % 2 == 1:
        tl.inline_asm_elementwise(
            "nanosleep.u32 100000; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return load_words(address, wanted)


@triton.jit
def unrounded_sum(
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
    """row_sum of two ranks that leaves out the first rounding; for two_shot_kernel, where the words have come."""
    return unpack_row(own, DTYPE) + unpack_row(peek_words(start + lanes, wanted), DTYPE)


@triton.jit
def careless_zero(scales, num_rows, HIDDEN: tl.constexpr, FORMAT: tl.constexpr, ZEROING: tl.constexpr):
    """zero_rest that leaves the scales of rows that don't exist as they were."""
    return


def rebuilt(kernel: Any, **replaced: Any) -> Any:
    """`kernel` with other device functions in place of those that it names, or that functions it calls name."""
    function = kernel.fn
    names = dict(function.__globals__) | replaced
    for name in set(function.__code__.co_names) - set(replaced):
        called = names.get(name)
        if isinstance(called, triton.JITFunction):
            names[name] = rebuilt(called, **replaced)
    changed = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    changed.__module__, changed.__annotations__ = function.__module__, function.__annotations__
    changed.__doc__ = function.__doc__
    return triton.jit(changed, do_not_specialize=kernel.do_not_specialize)
