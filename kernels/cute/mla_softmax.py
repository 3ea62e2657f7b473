"""Running maxima and sums of a softmax in base 2, where an empty set of scores gives 0 and -inf."""

import cutlass.cute as cute
from cutlass import Float32, Int32

NOTHING = -float("inf")


@cute.jit
def finite(largest: Float32) -> Float32:
    """What scores are subtracted from: 0 where there are none, since -inf - -inf is NaN."""
    reference = largest
    if largest == NOTHING:
        reference = Float32(0.0)
    return reference


@cute.jit
def normalise(total: Float32, reference: Float32):
    """(1 / total, the logarithm of the sum of exponentials); (0, -inf) of nothing."""
    inverse = Float32(0.0)
    score = Float32(NOTHING)
    if total > 0.0:
        inverse = cute.arch.rcp_approx(total)
        score = reference + cute.math.log2(total, fastmath=True)
    return inverse, score


@cute.jit
def exp2(x: Float32) -> Float32:
    """2^x by the special function unit."""
    return cute.math.exp2(x, fastmath=True)


@cute.jit
def keys_seen(kv_len: Int32, row: Int32, rows: Int32, heads: Int32) -> Int32:
    """Keys that a query row sees: row = query token * heads + head, and the last query token sees all."""
    return kv_len - rows // heads + 1 + row // heads
