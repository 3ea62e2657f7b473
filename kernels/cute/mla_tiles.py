"""How the CTAs of a latent decode share the work, in tiles of 64 cached tokens.

The tiles of all sequences are laid end to end, and worker w takes [w * chunk, (w + 1) * chunk): so a sequence is cut
where a worker's part ends, whatever the lengths are. The lengths are read on the device. A worker is as many CTAs as
the query rows of a sequence need; a sequence without tokens has one tile, all of it masked.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

LATENT = 512
ROTATED = 64
WIDTH = LATENT + ROTATED
TILE = 64
BLOCK = 64  # columns of a swizzled block: 128 bytes a row
NUM_BLOCKS = WIDTH // BLOCK
NUM_LATENT_BLOCKS = LATENT // BLOCK
MANY_PARTS = 64  # merging more parts of a sequence takes longer than giving each of them another tile


@cute.jit
def tiles_of(kv_lens: cute.Tensor, seq: Int32) -> Int32:
    """The tiles of a sequence, 0 beyond the last one."""
    tiles = Int32(0)
    if seq < kv_lens.shape[0]:
        tiles = cutlass.max((kv_lens[seq] + TILE - 1) // TILE, Int32(1))
    return tiles


@cute.jit
def plan_work(kv_lens: cute.Tensor, work: cute.Tensor, num_workers: Int32, worker: Int32) -> None:
    """One warp writes what a worker does: work = [first tile, end, sequence of the first, tiles before it, chunk]."""
    lane = cute.arch.lane_idx()
    num_seqs = kv_lens.shape[0]
    total = Int32(0)
    longest = Int32(1)
    base = Int32(0)
    while base < num_seqs:
        tiles = tiles_of(kv_lens, base + lane)
        total += cute.arch.warp_reduction(tiles, lambda x, y: x + y)
        longest = cutlass.max(longest, cute.arch.warp_reduction(tiles, lambda x, y: cutlass.max(x, y)))
        base += 32
    chunk = _chunk_of(total, longest, num_workers)
    first = worker * chunk
    seq = Int32(0)
    before = Int32(0)
    seen = Int32(0)
    found = Int32(0)
    base = Int32(0)
    while base < num_seqs and found == 0:
        tiles = tiles_of(kv_lens, base + lane)
        upto = tiles  # of the lanes up to this one
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, 1 << step)
            if lane >= (1 << step):
                upto += other
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(seen + upto <= first))
        if passed < 32:
            found = Int32(1)
            seq = base + passed
            before = cute.arch.shuffle_sync(seen + upto - tiles, passed)
        else:
            seen += cute.arch.shuffle_sync(upto, 31)
        base += 32
    if lane == 0:
        work[0] = first
        work[1] = cutlass.min(first + chunk, total)
        work[2] = seq
        work[3] = before
        work[4] = chunk


@cute.jit
def _chunk_of(total: Int32, longest: Int32, num_workers: Int32) -> Int32:
    """Tiles of a worker: an even share, or whole sequences of equal length if that costs at most a sixteenth."""
    chunk = (total + num_workers - 1) // num_workers
    whole = (chunk + longest - 1) // longest * longest
    if whole * 16 <= chunk * 17 + 16:
        chunk = whole
    if chunk == 1 and longest > MANY_PARTS:
        chunk = Int32(2)
    return chunk


@cute.jit
def describe_parts(parts: cute.Tensor, seq: Int32, before: Int32, tiles: Int32, chunk: Int32) -> None:
    """parts[seq] = [first worker, number of workers], by the CTA that has the sequence's first tile."""
    first = before // chunk
    parts[seq, 0] = first
    parts[seq, 1] = (before + tiles - 1) // chunk - first + 1


@cute.jit
def part_slot(worker: Int32, row_tiles: Int32, row_tile: Int32, starts: Int32) -> Int32:
    """Where a CTA keeps its part of a sequence: a worker has at most one that starts with it, and one that doesn't."""
    return 2 * (worker * row_tiles + row_tile) + starts


@cute.jit
def box_place(
    page_table: cute.Tensor,
    seq: Int32,
    kv_len: Int32,
    box_idx: Int32,
    box: cutlass.Constexpr,
    page_size: cutlass.Constexpr,
) -> Int32:
    """Where box `box_idx` of a sequence lies in the cache, in boxes; beyond the sequence any box will do."""
    token = box_idx * box
    place = Int32(0)
    if token < kv_len:
        page = page_table[seq, token // page_size]
        place = page * (page_size // box) + token % page_size // box
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
