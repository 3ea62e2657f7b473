"""How the CTAs of a grouped product share its tiles, all of it read on the device.

An expert's pairs are cut into as few tiles as hold them, of equal length; each of them times each block of output
channels is a tile of the product. Tile t belongs to CTA t % W. Tiles that share weights stand beside one another, so
that they run at one time: an expert's tiles of pairs come in groups of at most 8, and a group goes through all channels
before the next. Each lane of a warp looks up one of the next 32 tiles of its CTA.

E experts, W CTAs.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

MAX_EXPERTS = 256
TABLE_LEN = MAX_EXPERTS + 32  # whole warps write behind the last expert
_GROUP = 8
_NEVER = 0x7FFFFFFF


@cute.jit
def plan_tiles(
    firsts: cute.Tensor, tiles_before: cute.Tensor, first_pairs: cute.Tensor, channel_blocks: Int32, pairs: int
) -> None:
    """One warp copies `firsts` [E + 1] to shared memory and writes how many tiles come before each expert's."""
    lane = cute.arch.lane_idx()
    num_experts = firsts.shape[0] - 1
    seen = Int32(0)
    base = Int32(0)
    while base < TABLE_LEN:
        expert = base + lane
        tiles = Int32(0)
        first = Int32(0)
        if expert <= num_experts:
            first = firsts[expert]
        if expert < num_experts:
            tiles = (firsts[expert + 1] - first + pairs - 1) // pairs * channel_blocks
        upto = tiles  # of the lanes up to this one
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(upto, 1 << step)
            if lane >= (1 << step):
                upto += other
        before = seen + upto - tiles
        if expert > num_experts:
            before = Int32(_NEVER)
        tiles_before[expert] = before
        first_pairs[expert] = first
        seen += cute.arch.shuffle_sync(upto, 31)
        base += 32


@cute.jit
def look_up(
    tiles_before: cute.Tensor,
    first_pairs: cute.Tensor,
    tile: Int32,
    num_tiles: Int32,
    channel_blocks: Int32,
    pairs: int,
):
    """(expert, block of channels, first pair, pairs of the tile, pairs of the expert's longest tile).

    Of a tile behind the last one it tells nothing of use.
    """
    known = cutlass.max(cutlass.min(tile, num_tiles - 1), Int32(0))
    expert = Int32(0)
    for step in cutlass.range_constexpr(8):
        further = expert + (MAX_EXPERTS >> (step + 1))
        if tiles_before[further] <= known:
            expert = further
    within = known - tiles_before[expert]
    first = first_pairs[expert]
    count = first_pairs[expert + 1] - first
    tiles = cutlass.max((count + pairs - 1) // pairs, Int32(1))
    longest = (count + tiles - 1) // tiles
    group = within // (_GROUP * channel_blocks)
    within -= group * _GROUP * channel_blocks
    in_group = cutlass.min(tiles - group * _GROUP, Int32(_GROUP))
    block = within // in_group
    skipped = (group * _GROUP + within - block * in_group) * longest
    return expert, block, first + skipped, cutlass.min(longest, count - skipped), longest
