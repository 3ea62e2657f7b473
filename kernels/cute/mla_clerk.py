"""Who of the CTAs that worked on a sequence merges which of its rows.

The CTAs that have nothing after their part of a sequence merge a share of its rows each. Nothing promises that all CTAs
of a launch run at once: two launches may hold one half of the multiprocessors each. So a warp of each CTA, the clerk,
counts the CTA in when it begins, and waits until the others of its last sequence have begun, for a bounded time only.
After that the share is left to the CTA of the sequence that begins last.

The state of a sequence is one word, 0 before and after a launch: the CTAs that have begun, of which the first takes all
others off, and from bit 12 on those that have given up.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dist_infer.kernels.cute.mla_tiles import Task, parts_of, tiles_of

MAX_CTAS = 1024
NUM_STATES = 2 * MAX_CTAS  # of sequences, and whether a CTA has given up
DUTY = (2, 6 + MAX_CTAS // 32)  # of a sequence that was only finished here, of the last one
DUTY_BARRIER = 4  # of the clerk and the consumers
CONSUMERS = 256  # threads
_BITS = 12
_GAVE_UP = 1 << _BITS
_PATIENCE = 1 << 15  # looks at the state, about half a microsecond each


@cute.jit
def keep_count(task: Task, duty: cute.Tensor) -> None:
    """The clerk: leaves what consumers merge in duty = [sequence, worker, parts, shares, from, to, bits of these]."""
    lane = cute.arch.lane_idx()
    if lane == 0:
        for kind in cutlass.range_constexpr(2):
            duty[kind, 4] = Int32(0)
            duty[kind, 5] = Int32(-1)
    first, seq, before = task.first, task.seq, task.before
    while first < task.end:
        tiles = tiles_of(task.kv_lens, seq)
        stop = cutlass.min(task.end - before, tiles)
        if first > before or stop < tiles:
            worker, count = parts_of(before, tiles, task.chunk)
            part = task.worker - worker
            shares = count  # all but a CTA with the end that goes on to other sequences
            if before + tiles != task.total and (before + tiles) % task.chunk > 0:
                shares -= 1
            kind = Int32(0)
            if before + stop == task.end:
                kind = Int32(1)
            own, left = _begin(task, worker, part, count, kind > 0)
            _write_duty(task, duty, kind, worker, shares, part, own, left)
            if lane == 0:
                duty[kind, 0] = seq
                duty[kind, 1] = worker
                duty[kind, 2] = count
                duty[kind, 3] = shares
        first = before + stop
        before += tiles
        seq += 1
    cute.arch.sync_warp()
    cute.arch.barrier_arrive(barrier_id=DUTY_BARRIER, number_of_threads=CONSUMERS + 32)


@cute.jit
def _begin(task: Task, worker: Int32, part: Int32, count: Int32, waits: cutlass.Boolean):
    """Counts a CTA in at a sequence: (1 if it has a share and all have begun, how many have left theirs to it)."""
    state = task.states.iterator + (worker * task.row_tiles + task.row_tile)
    change = Int32(1)
    if part == 0:
        change -= count
    now = Int32(0)
    if cute.arch.lane_idx() == 0:
        now = cute.arch.atomic_add(state, change, sem="relaxed", scope="gpu") + change
    now = cute.arch.shuffle_sync(now, 0)
    left = Int32(0)
    if _missing(now) == 0:
        left = now >> _BITS
    own = Int32(0)
    if waits:
        looks = Int32(1)
        while _missing(now) != 0 and looks < _PATIENCE:
            now = cute.arch.load(state, Int32, sem="relaxed", scope="gpu")
            looks += 1
        now = cute.arch.shuffle_sync(now, 0)
        if _missing(now) != 0:
            now = _give_up(task, state)
        if _missing(now) == 0:
            own = Int32(1)
    return own, left


@cute.jit
def _missing(state: Int32) -> Int32:
    """0 once all CTAs of a sequence have begun."""
    return state & (_GAVE_UP - 1)


@cute.jit
def _give_up(task: Task, state: cute.Pointer) -> Int32:
    """The state that was met: where all have begun meanwhile, nothing is given up."""
    now = Int32(0)
    if cute.arch.lane_idx() == 0:
        now = cute.arch.atomic_add(state, Int32(_GAVE_UP), sem="relaxed", scope="gpu")
        if _missing(now) == 0:
            cute.arch.red(state, Int32(-_GAVE_UP), op="add", dtype="s32", sem="relaxed", scope="gpu")
        else:
            cta = task.worker * task.row_tiles + task.row_tile
            cute.arch.store(task.states.iterator + (MAX_CTAS + cta), Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(now, 0)


@cute.jit
def _write_duty(
    task: Task, duty: cute.Tensor, kind: Int32, worker: Int32, shares: Int32, part: Int32, own: Int32, left: Int32
) -> None:
    """The shares that the CTA merges, a bit each: its own, and those that others have left."""
    lane = cute.arch.lane_idx()
    words = (shares + 31) // 32
    low, high = part, part
    if left > 0:
        low, high = Int32(0), shares - 1
        found = Int32(0)
        while found < left:  # who gives up counts first and tells then
            found = Int32(0)
            for word in cutlass.range(words, unroll=1):
                gave_up = _look(task, worker, shares, word)
                found += cute.arch.popc(gave_up)
                if lane == 0:
                    duty[kind, 6 + word] = gave_up
        for word in cutlass.range(words, unroll=1):
            share = word * 32 + lane
            if share < shares:
                cute.arch.store(_gave_up(task, worker + share), Int32(0), sem="relaxed", scope="gpu")
        if lane == 0:
            state = task.states.iterator + (worker * task.row_tiles + task.row_tile)
            cute.arch.red(state, -(left << _BITS), op="add", dtype="s32", sem="relaxed", scope="gpu")
    elif lane == 0:
        duty[kind, 6 + part // 32] = Int32(0)
    if lane == 0 and own > 0:
        duty[kind, 6 + part // 32] = duty[kind, 6 + part // 32] | (Int32(1) << part % 32)
    if lane == 0 and (own > 0 or left > 0):
        duty[kind, 4] = low
        duty[kind, 5] = high


@cute.jit
def _gave_up(task: Task, worker: Int32) -> cute.Pointer:
    return task.states.iterator + (MAX_CTAS + worker * task.row_tiles + task.row_tile)


@cute.jit
def _look(task: Task, worker: Int32, shares: Int32, word: Int32) -> Int32:
    """Who has given up, a bit for each of 32 shares."""
    share = word * 32 + cute.arch.lane_idx()
    seen = Int32(0)
    if share < shares:
        seen = cute.arch.load(_gave_up(task, worker + share), Int32, sem="relaxed", scope="gpu")
    return cute.arch.vote_ballot_sync(seen > 0)
