"""Few pairs of a row and an expert, put in the order of their experts by each CTA of a grouped product for itself.

That takes about as long as to read the order from a launch before, which is one launch less. Pairs of an expert stand
in ascending order, so that all CTAs have the same.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32

from dist_infer.kernels.cute.moe_schedule import MAX_EXPERTS, plan_experts, sum_up_to

MAX_ORDERED = 512
WARPS = 8
SCRATCH_LEN = WARPS * MAX_EXPERTS  # pairs of a warp and an expert
_TURNS = MAX_ORDERED // (WARPS * 32)


@cute.jit
def plan_pairs(
    ids: cute.Tensor,  # [pair]
    num_experts: Int32,
    order: cute.Tensor,  # [pair], in shared memory
    scratch: cute.Pointer,
    tables: tuple[cute.Tensor, ...],
    channel_blocks: Int32,
    pairs: cutlass.Constexpr,
) -> None:
    """As moe_schedule.plan_tiles, and `order` holds the pairs expert by expert.

    The hardware may copy to `scratch` afterwards, not before.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), cute.arch.lane_idx()
    before = cute.make_tensor(scratch, cute.make_layout(SCRATCH_LEN))
    own, rank = rank_pairs(ids, Int32(0), num_experts, before, _TURNS)
    count = sum_of_warps(before)
    first = sum_up_to(count, tables[2]) - count
    plan_experts(first, count, num_experts, tables, channel_blocks, pairs, False)
    for turn in cutlass.range_constexpr(_TURNS):
        if own[turn] >= 0:
            place = tables[1][own[turn]] + before[warp * MAX_EXPERTS + own[turn]] + rank[turn]
            order[place] = Int16((warp * _TURNS + turn) * 32 + lane)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()


@cute.jit
def rank_pairs(ids: cute.Tensor, base: Int32, num_experts: Int32, before: cute.Tensor, turns: cutlass.Constexpr):
    """The experts of a thread's pairs, -1 where none is held, and how many of the warp's pairs before have the same.

    `before` becomes what each warp has of each expert. Pairs are from `base` on, 32 a turn of a warp, of the first
    WARPS warps; all threads take part.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), cute.arch.lane_idx()
    own = cute.make_rmem_tensor(cute.make_layout(turns), Int32)
    rank = cute.make_rmem_tensor(cute.make_layout(turns), Int32)
    if thread < MAX_EXPERTS:
        for idx in cutlass.range_constexpr(WARPS):
            before[idx * MAX_EXPERTS + thread] = Int32(0)
    for turn in cutlass.range_constexpr(turns):
        own[turn], rank[turn] = Int32(-1), Int32(0)
        pair = base + (warp * turns + turn) * 32 + lane
        if warp < WARPS and pair < cute.size(ids):
            expert = ids[pair]
            if expert >= 0 and expert < num_experts:
                own[turn] = expert
    cute.arch.sync_threads()
    if warp < WARPS:
        for turn in cutlass.range_constexpr(turns):
            alike = cute.arch.match_sync(0xFFFFFFFF, own[turn])
            at = warp * MAX_EXPERTS + cutlass.max(own[turn], Int32(0))
            rank[turn] = Int32(cute.arch.popc(alike & cute.arch.lanemask_lt()))
            known = before[at]
            cute.arch.sync_warp()
            if rank[turn] == 0 and own[turn] >= 0:
                before[at] = known + Int32(cute.arch.popc(alike))
            cute.arch.sync_warp()
            rank[turn] += known
    cute.arch.sync_threads()
    return own, rank


@cute.jit
def sum_of_warps(before: cute.Tensor) -> Int32:
    """How many pairs the expert of a thread has; `before` becomes what the warps before each have."""
    thread, _, _ = cute.arch.thread_idx()
    count = Int32(0)
    if thread < MAX_EXPERTS:
        for idx in cutlass.range_constexpr(WARPS):
            here = before[idx * MAX_EXPERTS + thread]
            before[idx * MAX_EXPERTS + thread] = count
            count += here
    return count
