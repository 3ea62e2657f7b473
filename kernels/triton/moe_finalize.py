"""The sum over the experts of each row in Triton; the contract stands in kernels/moe_finalize.py.

`finalized_words` is for kernels that go on with the row: kernels/triton/all_reduce. V vectors of 16 bytes in a row.
"""
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False

import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.carriers import ExpertOutputs
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs
from dist_infer.kernels.triton.peer_words import load_words

_CHANNELS = 1024  # that a program adds up
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _product(x, factor):
    """Rounded, whatever is added to it: in every kernel the same."""
    if _INTERPRETED:
        product = x * factor
    else:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, factor], dtype=tl.float32, is_pure=True, pack=1
        )
    return product


@triton.jit
def weighted(total, x, expert, weight, NUM_EXPERTS: tl.constexpr):
    """`total` and the output `x` of one expert, where that is held."""
    is_held = (expert >= 0) & (expert < NUM_EXPERTS)
    return total + tl.where(is_held, _product(x, weight + tl.zeros_like(x)), 0.0)


@triton.jit
def _elements(word, DTYPE: tl.constexpr):
    """The two elements of a word in float32; of a float32 there is one, and nothing."""
    if tl.float32 == DTYPE:
        low = word.to(tl.float32, bitcast=True)
        high = low * 0
    else:
        low = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _word(sums, DTYPE: tl.constexpr):
    """The word of two sums, rounded."""
    if tl.float32 == DTYPE:
        word = sums[0].to(tl.int32, bitcast=True)
    else:
        low = sums[0].to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        high = sums[1].to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        word = (low & 0xFFFF) | (high << 16)
    return word


@triton.jit
def _add_expert(sums, word, expert, weight, NUM_EXPERTS: tl.constexpr, DTYPE: tl.constexpr):
    low, high = _elements(word, DTYPE)
    return weighted(sums[0], low, expert, weight, NUM_EXPERTS), weighted(sums[1], high, expert, weight, NUM_EXPERTS)


@triton.jit
def _add_shared(sums, word, DTYPE: tl.constexpr):
    low, high = _elements(word, DTYPE)
    return sums[0] + low, sums[1] + high


@triton.jit
def finalized_words(
    outputs,
    ids,
    weights,
    shared,
    row,
    lanes,
    wanted,
    ROW_BYTES: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Row `row`, an int64, of the sum, as words. `outputs` and `shared` are addresses of rows of ROW_BYTES.

    Word by word: elements in a row of their own would go to other threads on their way back.
    """
    loaded = ()
    needed = tl.zeros(lanes.shape, tl.int32)
    for k in tl.static_range(TOP_K):
        choice = row * TOP_K + k
        words = load_words(outputs + choice * ROW_BYTES + lanes, wanted)
        loaded += ((words, tl.load(ids + choice), tl.load(weights + choice)),)  # type: ignore[assignment]
        needed |= words[0]
    # No address is negative, which no compiler knows: all outputs are asked for before the first is added, in one wait.
    zero = tl.where(outputs < 0, needed, 0).to(tl.float32, bitcast=True)
    sums_0, sums_1, sums_2, sums_3 = (zero, zero), (zero, zero), (zero, zero), (zero, zero)
    for k in tl.static_range(TOP_K):
        words, expert, weight = loaded[k]  # type: ignore[var-annotated]
        sums_0 = _add_expert(sums_0, words[0], expert, weight, NUM_EXPERTS, DTYPE)
        sums_1 = _add_expert(sums_1, words[1], expert, weight, NUM_EXPERTS, DTYPE)
        sums_2 = _add_expert(sums_2, words[2], expert, weight, NUM_EXPERTS, DTYPE)
        sums_3 = _add_expert(sums_3, words[3], expert, weight, NUM_EXPERTS, DTYPE)
    if shared is not None:
        words = load_words(shared + row * ROW_BYTES + lanes, wanted)
        sums_0, sums_1 = _add_shared(sums_0, words[0], DTYPE), _add_shared(sums_1, words[1], DTYPE)
        sums_2, sums_3 = _add_shared(sums_2, words[2], DTYPE), _add_shared(sums_3, words[3], DTYPE)
    return _word(sums_0, DTYPE), _word(sums_1, DTYPE), _word(sums_2, DTYPE), _word(sums_3, DTYPE)


@triton.jit
def _finalize_kernel(
    outputs,
    ids,
    weights,
    shared,
    out,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < WIDTH
    total = tl.zeros([CHANNELS], tl.float32)
    for k in tl.static_range(TOP_K):
        choice = row * TOP_K + k
        expert = tl.load(ids + choice)
        read = inside & (expert >= 0) & (expert < NUM_EXPERTS)
        x = tl.load(outputs + choice * WIDTH + column, mask=read, other=0.0).to(tl.float32)
        total = weighted(total, x, expert, tl.load(weights + choice).to(tl.float32), NUM_EXPERTS)
    if shared is not None:
        total += tl.load(shared + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def moe_finalize(x: ExpertOutputs) -> Tensor:
    """See `dist_infer.kernels.moe_finalize.moe_finalize`."""
    num_rows, width = x.shape
    out = x.outputs.new_empty(num_rows, width)
    if out.numel():
        channels = min(_CHANNELS, triton.next_power_of_2(width))
        _finalize_kernel[(num_rows, triton.cdiv(width, channels))](
            x.outputs.contiguous(),
            x.ids.contiguous(),
            x.weights.contiguous(),
            None if x.shared is None else x.shared.contiguous(),
            out,
            WIDTH=width,
            CHANNELS=channels,
            TOP_K=x.ids.shape[1],
            NUM_EXPERTS=x.num_experts,
            **overlapping(out),
        )
    return out
