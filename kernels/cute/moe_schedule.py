"""How the CTAs of a grouped product share its tiles, all of it read on the device.

An expert's pairs are cut into as few tiles as hold them, of equal length; each of them times each block of output
channels is a tile of the product. Experts stand in the order of their tiles' lengths, the longest first, and CTAs take
turns from either end: tile 0 to W - 1 belong to CTA 0 to W - 1, tile W to 2 W - 1 to CTA W - 1 to 0, and so on, which
leaves all with nearly the same work. Tiles that share weights stand beside one another, so that they run at one time:
an expert's tiles of pairs come in groups of at most 8, and a group goes through all channels before the next. Each lane
of a warp looks up one of the next 32 tiles of its CTA.

The two CTAs of a cluster have tiles beside one another: two of pairs with the same weights, which they load together,
or, where an expert's tiles of pairs are odd in number, its last one with two blocks of channels.

E experts, W CTAs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dist_infer.kernels.cute.moe_copies import load_four

MAX_EXPERTS = 256
TABLE_LEN = MAX_EXPERTS + 8
_TOTALS = MAX_EXPERTS  # behind the experts of a table: what the warps of the plan have counted
_GROUP = 8
_BITS = 8  # of an expert's number


def make_tables(memory: cute.Pointer) -> tuple[cute.Tensor, ...]:
    """(tiles that come before an expert's, its first pair, its pairs, its number), from 4 x TABLE_LEN Int32.

    The first has one entry more: how many tiles there are.
    """
    return tuple(cute.make_tensor(memory + TABLE_LEN * which, cute.make_layout(TABLE_LEN)) for which in range(4))


@cute.jit
def plan_tiles(
    firsts: cute.Tensor,
    tables: tuple[cute.Tensor, ...],
    channel_blocks: Int32,
    pairs: cutlass.Constexpr,
    sorts: cutlass.Constexpr,
    cluster: cutlass.Constexpr = 1,
) -> None:
    """All threads of a CTA, at least MAX_EXPERTS, write the tables from `firsts` [E + 1].

    A tile has `pairs` at most.
    """
    thread, _, _ = cute.arch.thread_idx()
    num_experts = firsts.shape[0] - 1
    first, count = Int32(0), Int32(0)
    if thread < num_experts:
        first = firsts[thread]
        count = firsts[thread + 1] - first
    plan_experts(first, count, num_experts, tables, channel_blocks, pairs, sorts, cluster)


@cute.jit
def plan_experts(
    first: Int32,
    count: Int32,
    num_experts: Int32,
    tables: tuple[cute.Tensor, ...],
    channel_blocks: Int32,
    pairs: cutlass.Constexpr,
    sorts: cutlass.Constexpr,
    cluster: cutlass.Constexpr = 1,
) -> None:
    """As plan_tiles, where each thread knows the first pair of its expert and how many there are."""
    tiles_before, first_pairs, counts, experts = tables
    thread, _, _ = cute.arch.thread_idx()
    place = thread
    if cutlass.const_expr(sorts):
        longest, _ = _cut(count, pairs)
        key = (longest << _BITS) + (MAX_EXPERTS - 1 - thread)  # different in all threads
        if thread < MAX_EXPERTS:
            tiles_before[thread] = key
        cute.arch.sync_threads()
        if thread < num_experts:
            place = Int32(0)
            other = Int32(0)
            while other < num_experts:
                for value in load_four(tiles_before.iterator.toint() + other * 4):
                    if value > key:
                        place += 1
                other += 4
    if thread < MAX_EXPERTS:
        first_pairs[place], counts[place], experts[place] = first, count, thread
    cute.arch.sync_threads()
    tiles = Int32(0)
    if thread < MAX_EXPERTS:
        _, tiles = _cut(counts[thread], pairs)
        if cutlass.const_expr(cluster == 1):
            tiles *= channel_blocks
        else:
            tiles = (tiles // 2 * channel_blocks + tiles % 2 * ((channel_blocks + 1) // 2)) * 2
    upto = sum_up_to(tiles, experts)
    if thread < MAX_EXPERTS:
        tiles_before[thread] = upto - tiles
        if thread == MAX_EXPERTS - 1:
            tiles_before[MAX_EXPERTS] = upto
    cute.arch.sync_threads()


@cute.jit
def sum_up_to(value: Int32, table: cute.Tensor) -> Int32:
    """The values of the threads up to this one, of the first MAX_EXPERTS. All threads take part, with a table's end."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    upto = value
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(upto, 1 << step)
        if cute.arch.lane_idx() >= (1 << step):
            upto += below
    if thread < MAX_EXPERTS and thread % 32 == 31:
        table[_TOTALS + warp] = upto
    cute.arch.sync_threads()
    if thread < MAX_EXPERTS:
        for idx in cutlass.range_constexpr(MAX_EXPERTS // 32 - 1):
            if idx < warp:
                upto += table[_TOTALS + idx]
    return upto


@cute.jit
def tile_of(turn: Int32) -> Int32:
    """The tile that this CTA has when it is its turn."""
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    from_start = turn * num_ctas + cta
    from_end = (turn + 1) * num_ctas - 1 - cta
    return from_start if turn % 2 == 0 else from_end


@cute.jit
def look_up(
    tables: tuple[cute.Tensor, ...], turn: Int32, num_tiles: Int32, channel_blocks: Int32, pairs: cutlass.Constexpr
):
    """(expert, block of channels, first pair, pairs of the tile, pairs of the expert's longest tile).

    Behind the last tile it tells nothing of use.
    """
    return look_up_in_cluster(tables, turn, num_tiles, channel_blocks, pairs, 1)[:5]


@cute.jit
def look_up_in_cluster(
    tables: tuple[cute.Tensor, ...],
    turn: Int32,
    num_tiles: Int32,
    channel_blocks: Int32,
    pairs: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
):
    """As look_up, and then whether both CTAs of a cluster have the same weights, 1 or 0.

    In a cluster a block may come behind the last one.
    """
    tiles_before, first_pairs, counts, experts = tables
    known = cutlass.max(cutlass.min(tile_of(turn), num_tiles - 1), Int32(0))
    place = Int32(0)
    for step in cutlass.range_constexpr(8):
        further = place + (MAX_EXPERTS >> (step + 1))
        if tiles_before[further] <= known:
            place = further
    within = known - tiles_before[place]
    first, count = first_pairs[place], counts[place]
    longest, tiles = _cut(count, pairs)
    grouped = tiles // cluster * cluster
    group = within // (_GROUP * channel_blocks)
    in_group = cutlass.max(cutlass.min(grouped - group * _GROUP, Int32(_GROUP)), Int32(1))
    of_group = within - group * _GROUP * channel_blocks
    block = of_group // in_group
    tile = group * _GROUP + of_group - block * in_group
    shares = Int32(1)
    if cutlass.const_expr(cluster > 1) and within >= grouped * channel_blocks:
        block, tile, shares = within - grouped * channel_blocks, tiles - 1, Int32(0)
    first += tile * longest
    return experts[place], block, first, cutlass.min(longest, count - tile * longest), longest, shares


@cute.jit
def _cut(count: Int32, pairs: cutlass.Constexpr):
    """(length of the longest tile, tiles) of so many pairs."""
    tiles = (count + pairs - 1) // pairs
    least = cutlass.max(tiles, Int32(1))
    return (count + least - 1) // least, tiles
