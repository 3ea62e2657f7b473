"""How the CTAs of a latent decode share the work, in tiles of 64 cached tokens.

The tiles of all sequences are laid end to end, and worker w takes [w * chunk, (w + 1) * chunk): so a sequence is cut
where a worker's part ends, whatever the lengths are. The lengths are read on the device. A worker is as many CTAs as
the query rows of a sequence need; a sequence without tokens has one tile, all of it masked.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

LATENT = 512
ROTATED = 64
WIDTH = LATENT + ROTATED
TILE = 64
BLOCK = 64  # columns of a swizzled block: 128 bytes a row
BLOCK_BYTES = TILE * BLOCK * 2
NUM_BLOCKS = WIDTH // BLOCK
NUM_LATENT_BLOCKS = LATENT // BLOCK


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a CTA knows: the call's arguments, and its tiles [first, end), of which the first is of sequence `seq`.

    Shapes: see `mla_decode.mla_decode`; `states` are of the merge (see mla_merge).
    """

    page_table: cute.Tensor
    kv_lens: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    part_out: cute.Tensor
    part_lse: cute.Tensor
    states: cute.Tensor
    rows: Int32  # of a sequence
    row_tiles: Int32
    row_tile: Int32
    heads: Int32
    scale: Float32
    value_scale: Float32  # of a cache of E4M3, which `scale` has in it too; else 1
    layers: Int32
    layer: Int32
    worker: Int32
    first: Int32
    end: Int32
    seq: Int32
    before: Int32  # tiles before the first one of `seq`
    chunk: Int32  # tiles of a worker
    total: Int32  # tiles of all sequences


@cute.jit
def num_tiles(kv_len: Int32) -> Int32:
    """Of a sequence; without tokens it has one."""
    return cutlass.max((kv_len + TILE - 1) // TILE, Int32(1))


@cute.jit
def tiles_of(kv_lens: cute.Tensor, seq: Int32) -> Int32:
    """The tiles of a sequence, 0 beyond the last one."""
    tiles = Int32(0)
    if seq < kv_lens.shape[0]:
        tiles = num_tiles(kv_lens[seq])
    return tiles


@cute.jit
def parts_of(before: Int32, tiles: Int32, chunk: Int32):
    """(first worker, number of workers) of a sequence."""
    first = before // chunk
    return first, (before + tiles - 1) // chunk - first + 1


@cute.jit
def part_slot(worker: Int32, row_tiles: Int32, row_tile: Int32, starts: Int32) -> Int32:
    """Where a CTA keeps its part of a sequence: a worker has at most one that starts with it, and one that doesn't."""
    return 2 * (worker * row_tiles + row_tile) + starts


@cute.jit
def box_place(
    task: Task, seq: Int32, kv_len: Int32, box_idx: Int32, box: cutlass.Constexpr, page_size: cutlass.Constexpr
) -> Int32:
    """Where box `box_idx` of a sequence lies in the cache, in boxes; beyond the sequence any box will do."""
    token = box_idx * box
    place = Int32(0)
    if token < kv_len:
        slot = task.page_table[seq, token // page_size] * task.layers + task.layer
        place = slot * (page_size // box) + token % page_size // box
    return place


@cute.jit
def wrapped(slot: Int32, num_slots: cutlass.Constexpr) -> Int32:
    """A slot of a ring, counted at most once round."""
    where = slot
    if where >= num_slots:
        where -= num_slots
    return where


@cute.jit
def clear_latents(keys: cute.Tensor, token: Int32, slot: Int32, num_slots: cutlass.Constexpr, thread: Int32) -> None:
    """A warpgroup writes zeros from `token` of a tile on: there may be NaN, which a weight of 0 does not cancel.

    `keys` are [token, column, slot] in shared memory, the tile's latents begin in `slot`.
    """
    columns = cutlass.const_expr(cute.size(keys, mode=[1]))
    row = cutlass.max(token, Int32(0))
    while row < TILE:
        for turn in cutlass.range_constexpr(LATENT // 128):
            dim = thread + 128 * turn
            keys[row, dim % columns, wrapped(slot + dim // columns, num_slots)] = keys.element_type(0.0)
        row += 1
