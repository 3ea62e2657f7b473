"""Attention of few queries on many keys: the keys of a sequence are split over programs, whose results are merged.

How many splits there may be depends on host bounds alone, so that a captured launch stays right; how long they are, and
so how many are used, depends on each sequence's own length on the device. Each split leaves its weighted sum of values,
not yet divided, with the largest of its scores and the sum of its weights. Scores are in base 2.

A caller whose results must not depend on the batch asks for splits of FIXED keys: a sequence is then cut at multiples
of FIXED, or of more if it would have too many splits, whatever the others are.

S sequences, N query heads, V value channels, P splits.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from dist_infer.kernels.multiprocessors import num_multiprocessors
from dist_infer.kernels.triton.dependent_launch import overlapping, wait_for_inputs

MAX_SPLITS = 128
FIXED = 512
_INTERPRETED_PROCESSORS = 12  # of the "device" on which the interpreter runs


def choose_num_splits(
    num_programs: int, max_kv_len: int, keys: int, device: torch.device, *, per_processor: int
) -> int:
    """Splits that make `num_programs` unsplit programs fill the device, but none shorter than `keys`.

    `per_processor` is how many programs run beside each other on a multiprocessor.
    """
    room = per_processor * num_processors(device)
    num_splits = max(1, min(room // max(num_programs, 1), -(-max_kv_len // keys), MAX_SPLITS))
    return num_splits if num_splits < 32 else num_splits // 32 * 32  # the merge takes so many at a time


def num_fixed_splits(max_kv_len: int) -> int:
    """Splits that hold the longest sequence when it is cut by FIXED."""
    num_splits = max(1, min(-(-max_kv_len // FIXED), MAX_SPLITS))
    return num_splits if num_splits < 32 else -(-num_splits // 32) * 32


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, or what stands for them where Triton interprets."""
    if device.type == "cpu":
        return _INTERPRETED_PROCESSORS
    return num_multiprocessors(device)


_FIXED, _MAX_SPLITS = tl.constexpr(FIXED), tl.constexpr(MAX_SPLITS)


class SplitResults:
    """Room for what the splits leave; without splits there is none.

    Shapes: total [S, N, P, V], largest and weight_sum [S, N, P], float32.
    """

    def __init__(self, like: Tensor, num_seqs: int, num_heads: int, num_splits: int, value_dim: int) -> None:
        shape = (num_seqs, num_heads, num_splits) if num_splits > 1 else (0, 0, 0)
        self.total = torch.empty(*shape, value_dim, dtype=torch.float32, device=like.device)
        # Both begin at whole 16 bytes for any number of sequences: kernels are compiled for such addresses.
        numbers = torch.empty(2, -(-prod(shape) // 4) * 4, dtype=torch.float32, device=like.device)
        self.largest, self.weight_sum = (row[: prod(shape)].view(shape) for row in numbers)

    def merge(
        self,
        out: Tensor,
        query_start: Tensor,
        kv_lens: Tensor,
        keys: int,
        window: int | None = None,
        *,
        fixed: bool = False,
    ) -> None:
        """Writes the rows of sequences that were split; `keys` is what lengths of splits are a multiple of.

        With a `window` the last so many keys of a sequence were split; `fixed`: by FIXED.

        Shapes: out [T, N, V] contiguous.
        """
        num_seqs, num_heads, num_splits, value_dim = self.total.shape
        if num_splits == 0:
            return
        splits_block = 32 if num_splits <= 32 else 64 if num_splits <= 64 else MAX_SPLITS  # few variants to compile
        splits_block = MAX_SPLITS if fixed else splits_block  # another one adds in another order
        _merge_kernel[(num_heads, num_seqs)](
            self.total,
            self.largest,
            self.weight_sum,
            out,
            query_start,
            kv_lens,
            num_heads,
            num_splits,
            VALUE_DIM=value_dim,
            KEYS=keys,
            WINDOW=window,
            IS_FIXED=fixed,
            SPLITS_BLOCK=splits_block,
            DIM_BLOCK=min(128, triton.next_power_of_2(value_dim)),
            num_warps=4 if splits_block <= 32 else 8,
            **overlapping(out),
        )


@triton.jit
def split_length(kv_len, num_splits, KEYS: tl.constexpr, IS_FIXED: tl.constexpr = False):
    """Keys of each split but the last."""
    if IS_FIXED:
        length = tl.maximum(_FIXED, tl.cdiv(tl.cdiv(kv_len, _MAX_SPLITS), KEYS) * KEYS)
    else:
        length = tl.cdiv(tl.cdiv(kv_len, num_splits), KEYS) * KEYS
    return length


@triton.jit
def count_seen(kv_len, WINDOW: tl.constexpr):
    """Keys that the last query of a sequence sees."""
    if WINDOW is not None:
        kv_len = tl.minimum(kv_len, WINDOW)
    return kv_len


@triton.jit
def count_queries(query_start, seq):
    return tl.load(query_start + seq + 1) - tl.load(query_start + seq)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["query_start", "kv_lens"])
def _merge_kernel(
    split_total,
    split_largest,
    split_weight_sum,
    out,
    query_start,
    kv_lens,
    num_heads,
    num_splits,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_FIXED: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    head, seq = tl.program_id(0), tl.program_id(1)
    num_seen = count_seen(tl.load(kv_lens + seq), WINDOW)
    length = split_length(num_seen, num_splits, KEYS, IS_FIXED)
    if (num_seen <= length) | (count_queries(query_start, seq) != 1):
        return
    split = tl.arange(0, SPLITS_BLOCK)
    used = split * length < num_seen
    at = (seq.to(tl.int64) * num_heads + head) * num_splits + split
    largest = tl.load(split_largest + at, mask=used, other=-float("inf"))
    factor = tl.exp2(largest - tl.max(largest, 0))
    factor /= tl.sum(factor * tl.load(split_weight_sum + at, mask=used, other=0.0), 0)
    row = (tl.load(query_start + seq).to(tl.int64) * num_heads + head) * VALUE_DIM
    for start in tl.static_range(0, VALUE_DIM, DIM_BLOCK):
        dim = start + tl.arange(0, DIM_BLOCK)
        inside = dim < VALUE_DIM
        read = used[:, None] & inside[None, :]
        part = tl.load(split_total + at[:, None] * VALUE_DIM + dim[None, :], mask=read, other=0.0)
        merged = tl.sum(part * factor[:, None], 0)
        tl.store(out + row + dim, merged.to(out.dtype.element_ty), mask=inside)
