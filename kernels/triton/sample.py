"""The choice of a token and its noise in Triton; the contract stands in kernels/sample.py.

A row is cut into parts, so that few rows too keep the whole GPU busy: one launch finds each part's best, a second one
the best of the parts. The best doesn't depend on the cut, because ties have an order.

The exact noise takes two logarithms in float64. So a float32 bound is looked at first, and only a block of columns of
which one may beat the best so far gets exact scores. As -log(u) >= 1 - u, the noise is at most -log(1 - u), and close
to that where it is large.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # columns that a program looks at at a time
_PROGRAMS = 1056  # eight for each multiprocessor of an H200
_MAX_PARTS = 256  # a tile of the second launch
_KEYS_BLOCK = 128

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_LAST_ID = tl.constexpr(2**63 - 1)


@triton.jit
def _draw(key, number):
    """Number `number` of the SplitMix64 stream of `key`, all uint64."""
    bits = key + _GOLDEN + number * _GOLDEN
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    return bits ^ (bits >> 31)


@triton.jit
def _gumbel_noise(bits):
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _bound(scores, bits, heat):
    """At least scores + heat * noise, in float32; -inf stays."""
    complement = ((bits ^ 0xFFFFFFFFFFFFFFFF) >> 32).to(tl.float32) * 2.3283064365386963e-10
    wide = scores - heat * 0.6931472 * tl.log2(complement) + (tl.abs(scores) * 1e-5 + heat * 1e-3)
    wide = tl.where(wide == wide, wide, float("inf"))
    return tl.where(scores == float("-inf"), scores, wide)


@triton.jit
def _best(scores, ids):
    """The largest score, and the smallest id that has it."""
    top = tl.max(scores, 0)
    return top, tl.min(tl.where(scores == top, ids, _LAST_ID), 0)


@triton.jit
def _better_of(score, winner, other_score, other_winner):
    is_other = (other_score > score) | ((other_score == score) & (other_winner < winner))
    return tl.where(is_other, other_score, score), tl.where(is_other, other_winner, winner)


@triton.jit
def _with_plain_block(score, winner, values, ids):
    top = tl.max(values, 0)
    if top.to(tl.float64) >= score:
        top, first = _best(values, ids)
        score, winner = _better_of(score, winner, top.to(tl.float64), first)
    return score, winner


@triton.jit
def _with_noisy_block(score, winner, values, ids, key, heat):
    bits = _draw(key, ids.to(tl.uint64))
    if values.dtype == tl.float64:
        top = tl.full([], float("inf"), tl.float32)
    else:
        top = tl.max(_bound(values, bits, heat.to(tl.float32)), 0)
    if top.to(tl.float64) >= score:
        exact, first = _best(_gumbel_noise(bits) * heat + values.to(tl.float64), ids)
        score, winner = _better_of(score, winner, exact, first)
    return score, winner


@triton.jit
def _columns(logits, row, column, row_stride, column_stride, inside):
    return tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=0)


@triton.jit(do_not_specialize_on_alignment=["temperature", "keys"])
def _best_of_parts(
    logits,
    ids,
    temperature,
    keys,
    cut_values,
    last_ties,
    scores,
    best_ids,
    num_columns,
    part_len,
    row_stride,
    column_stride,
    first_id,
    ids_stride,
    BLOCK: tl.constexpr,
):
    """The best of a part of a row; below a cut value, or equal to it right of the last tie, a column never wins."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    score, winner = tl.full([], float("-inf"), tl.float64), tl.full([], _LAST_ID, tl.int64)
    start, end = part * part_len, tl.minimum((part + 1) * part_len, num_columns)
    column = start + tl.arange(0, BLOCK)
    following = _columns(logits, row, column, row_stride, column_stride, column < num_columns)
    for first in range(start, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < num_columns
        values = following
        is_next = (column + BLOCK < num_columns) & (first + BLOCK < end)
        following = _columns(logits, row, column + BLOCK, row_stride, column_stride, is_next)
        if values.dtype != tl.float64:
            values = values.to(tl.float32)
        values = tl.where(inside & (values == values), values, float("-inf"))
        if cut_values is not None:
            cut = tl.load(cut_values + row).to(values.dtype)
            is_in = (values > cut) | ((values == cut) & (column <= tl.load(last_ties + row)))
            values = tl.where(is_in, values, float("-inf"))
        own_ids = column.to(tl.int64) + first_id
        if ids is not None:
            own_ids = tl.load(ids + row * ids_stride + column, mask=inside, other=0)
        own_ids = tl.where(inside, own_ids, _LAST_ID)
        if temperature is None:
            score, winner = _with_plain_block(score, winner, values, own_ids)
        else:
            heat = tl.load(temperature + row)
            if heat == 0:
                score, winner = _with_plain_block(score, winner, values, own_ids)
            else:
                key = tl.load(keys + row).to(tl.uint64)
                score, winner = _with_noisy_block(score, winner, values, own_ids, key, heat)
    out = row * tl.num_programs(1) + part
    tl.store(scores + out, score)
    tl.store(best_ids + out, winner)


# Of candidates, which are few and of any number: one variant for all of their shapes.
_best_of_candidates = triton.jit(
    _best_of_parts.fn,
    do_not_specialize=["num_columns", "part_len", "row_stride", "column_stride", "first_id", "ids_stride"],
    do_not_specialize_on_alignment=["logits", "ids", "temperature", "keys"],
)


@triton.jit(do_not_specialize=["num_parts"])
def _best_of_row(part_scores, part_ids, scores, best_ids, num_parts, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILE)
    inside = part < num_parts
    own_scores = tl.load(part_scores + row * num_parts + part, mask=inside, other=float("-inf"))
    own_ids = tl.load(part_ids + row * num_parts + part, mask=inside, other=_LAST_ID)
    score, winner = _best(own_scores, own_ids)
    tl.store(scores + row, score)
    tl.store(best_ids + row, winner)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seeds", "positions"])
def _row_keys(seeds, positions, keys, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    seed = tl.load(seeds + row, mask=inside, other=0).to(tl.uint64)
    position = tl.load(positions + row, mask=inside, other=0).to(tl.uint64)
    tl.store(keys + row, _draw(_draw(tl.zeros_like(seed), seed), position).to(tl.int64), mask=inside)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """See `dist_infer.kernels.sample.row_keys`."""
    keys = torch.empty_like(seeds)
    if len(seeds):
        grid = (triton.cdiv(len(seeds), _KEYS_BLOCK),)
        _row_keys[grid](seeds.contiguous(), positions.contiguous(), keys, len(seeds), BLOCK=_KEYS_BLOCK, num_warps=4)
    return keys


def sample(logits: Tensor, ids: Tensor | int, temperature: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `dist_infer.kernels.sample.sample`."""
    return sample_above(logits, ids, temperature, keys, None, None)


def sample_above(
    logits: Tensor,
    ids: Tensor | int,
    temperature: Tensor | None,
    keys: Tensor | None,
    cut_values: Tensor | None,
    last_ties: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`sample` of the columns above each row's cut value, and of those that equal it up to its last tie.

    Shapes: cut_values [L] float64, last_ties [L] int32, both or none.
    """
    num_rows, num_columns = logits.shape
    num_parts, part_len = _cut_row(num_rows, num_columns)
    scores = torch.empty((num_rows, num_parts), dtype=torch.float64, device=logits.device)
    best_ids = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return scores.view(0), best_ids.view(0)
    table = None if isinstance(ids, int) else ids.contiguous()
    kernel = _best_of_candidates if logits.dtype == torch.float64 else _best_of_parts
    kernel[(num_rows, num_parts)](
        logits,
        table,
        None if temperature is None else temperature.contiguous(),
        None if keys is None else keys.contiguous(),
        cut_values,
        last_ties,
        scores,
        best_ids,
        num_columns,
        part_len,
        logits.stride(0),
        logits.stride(1),
        ids if isinstance(ids, int) else 0,
        0 if table is None or table.dim() == 1 else num_columns,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # the reference rounds noise * temperature before it adds
    )
    return _best_of_each(scores, best_ids)


def _best_of_each(part_scores: Tensor, part_ids: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, num_parts = part_scores.shape
    if num_parts == 1:
        return part_scores.view(num_rows), part_ids.view(num_rows)
    scores, best_ids = part_scores.new_empty(num_rows), part_ids.new_empty(num_rows)
    tile = triton.next_power_of_2(num_parts)
    _best_of_row[(num_rows,)](part_scores, part_ids, scores, best_ids, num_parts, TILE=tile, num_warps=4)
    return scores, best_ids


def _cut_row(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Parts of a row, and columns of a part."""
    wanted = min(_MAX_PARTS, max(1, _PROGRAMS // max(1, num_rows)))
    part_len = triton.cdiv(triton.cdiv(num_columns, wanted), _BLOCK) * _BLOCK
    return triton.cdiv(num_columns, part_len), part_len
