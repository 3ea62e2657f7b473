"""A CTA's share of the work, planned while the launch before still runs and confirmed once it has ended.

The launch before may write lengths and pages. So what is read of them early is a guess, and read past the first cache,
which would keep it. It brings the tiles that a CTA begins with into the second one, and holds if the lengths do.

Whatever lies between the end of the launch before and a CTA's first load counts twice: where an SM was the last to be
free, its CTA begins last, and asks memory that the loads of all others keep busy.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from dist_infer.kernels.cute.mla_tiles import TILE, num_tiles

LENS_OF_LANE = 4  # that a guess remembers: of up to 128 sequences


@cute.jit
def plan_ahead(
    box: cutlass.Constexpr,
    page_size: cutlass.Constexpr,
    ahead: cutlass.Constexpr,
    cache_rows: cute.Tensor,
    page_table: cute.Tensor,
    kv_lens: cute.Tensor,
    work: cute.Tensor,
    num_workers: Int32,
    worker: Int32,
    many_parts: cutlass.Constexpr,
    layers: Int32,
    layer: Int32,
    guessed: cute.Tensor,
) -> None:
    """One warp writes `work` and the lengths it knows of, and brings so many of the tiles into the second cache."""
    lane = cute.arch.lane_idx()
    guessed.store(_lens_of_lane(kv_lens).load())
    _plan_work(kv_lens, guessed, work, num_workers, worker, many_parts)
    if cutlass.const_expr(ahead > 0):
        known, _, _ = _first_boxes(box, page_size, page_table, kv_lens, work, layers, layer)
        begins = work[0] + lane // (TILE // box) < cutlass.min(work[1], work[0] + ahead)
        if begins and known >= 0 and known < cache_rows.shape[0] // box:
            row = cache_rows.iterator.toint() + (known * box).to(Int64) * (cache_rows.stride[0] * 2)
            num_bytes = cutlass.const_expr(box * cache_rows.shape[1] * 2)
            cute.arch.inline_ptx(
                "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[row, Int32(num_bytes)]
            )


@cute.jit
def confirm_plan(
    box: cutlass.Constexpr,
    page_size: cutlass.Constexpr,
    page_table: cute.Tensor,
    kv_lens: cute.Tensor,
    guessed: cute.Tensor,
    work: cute.Tensor,
    num_workers: Int32,
    worker: Int32,
    many_parts: cutlass.Constexpr,
    layers: Int32,
    layer: Int32,
):
    """After the launch before: (boxes lane and lane + 32 of the work, the length of its first sequence)."""
    lens = _lens_of_lane(kv_lens)
    known, later, kv_len = _first_boxes(box, page_size, page_table, kv_lens, work, layers, layer)
    changed = Int32(kv_lens.shape[0]) > 32 * LENS_OF_LANE
    for idx in cutlass.range_constexpr(LENS_OF_LANE):
        changed = changed or lens[idx] != guessed[idx]
    if cute.arch.vote_any_sync(changed):
        _plan_work(kv_lens, lens, work, num_workers, worker, many_parts)
        known, later, kv_len = _first_boxes(box, page_size, page_table, kv_lens, work, layers, layer)
    return known, later, kv_len


@cute.jit
def fetch_table(page_table: cute.Tensor, cta: Int32, num_ctas: Int32) -> None:
    """A warp's share of bringing the page table into the L2 cache; what it says may still change."""
    lines = (page_table.shape[1] + 31) // 32  # of 128 bytes
    line = cta * 32 + cute.arch.lane_idx()
    while line < page_table.shape[0] * lines:
        place = cute.domain_offset((line // lines, line % lines * 32), page_table).iterator
        cute.arch.prefetch(place.to_llvm_ptr(), cache_level="L2")
        line += num_ctas * 32


@cute.jit
def _plan_work(
    kv_lens: cute.Tensor,
    lens: cute.Tensor,
    work: cute.Tensor,
    num_workers: Int32,
    worker: Int32,
    many_parts: cutlass.Constexpr,
) -> None:
    """work = [first tile, end, its sequence, tiles before it, chunk, total].

    Each lane counts the tiles of a run of sequences, of which the first have `lens`. Merging more than `many_parts` of
    a sequence takes longer than giving each of them a second tile.
    """
    lane = cute.arch.lane_idx()
    num_seqs = Int32(kv_lens.shape[0])
    run = (num_seqs + 31) // 32
    first_tiles = cute.make_rmem_tensor(cute.make_layout(LENS_OF_LANE), Int32)
    first_tiles.fill(0)
    own = Int32(0)
    longest = Int32(1)
    for idx in cutlass.range_constexpr(LENS_OF_LANE):
        if idx < run and lane * run + idx < num_seqs:
            first_tiles[idx] = num_tiles(lens[idx])
        own += first_tiles[idx]
        longest = cutlass.max(longest, first_tiles[idx])
    for idx in cutlass.range(LENS_OF_LANE, run, unroll=4):
        tiles = _tiles_of(kv_lens, lane * run + idx)
        own += tiles
        longest = cutlass.max(longest, tiles)
    upto = own  # of the lanes up to this one
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(upto, 1 << step)
        if lane >= (1 << step):
            upto += other
    total = cute.arch.shuffle_sync(upto, 31)
    longest = cute.arch.warp_redux_sync(longest, "max")
    chunk = _chunk_of(num_seqs, total, longest, num_workers, many_parts)
    first = worker * chunk
    seq, before = Int32(0), Int32(0)
    if first < total:
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(upto <= first))
        seq = passed * run
        before = cute.arch.shuffle_sync(upto - own, passed)
        tiles = Int32(0)
        for idx in cutlass.range_constexpr(LENS_OF_LANE):
            if seq == passed * run + idx and idx < run:
                tiles = cute.arch.shuffle_sync(first_tiles[idx], passed)
                if before + tiles <= first:
                    before += tiles
                    seq += 1
        if seq >= passed * run + LENS_OF_LANE:
            tiles = _tiles_of(kv_lens, seq)
            while before + tiles <= first and seq < num_seqs:
                before += tiles
                seq += 1
                tiles = _tiles_of(kv_lens, seq)
    if lane == 0:
        work[0] = first
        work[1] = cutlass.min(first + chunk, total)
        work[2] = seq
        work[3] = before
        work[4] = chunk
        work[5] = total
    cute.arch.sync_warp()


@cute.jit
def _chunk_of(
    num_seqs: Int32, total: Int32, longest: Int32, num_workers: Int32, many_parts: cutlass.Constexpr
) -> Int32:
    """Tiles of a worker: an even share, or whole sequences of equal length if that costs at most a sixteenth.

    So do equal parts of sequences of equal length.
    """
    chunk = cutlass.max((total + num_workers - 1) // num_workers, Int32(1))
    whole = (chunk + longest - 1) // longest * longest
    if whole * 16 <= chunk * 17 + 16:
        chunk = whole
    elif chunk < longest and total == longest * num_seqs:
        parts = longest // chunk
        even = (longest + parts - 1) // parts
        if even * 16 <= chunk * 17:
            chunk = even
    if chunk == 1 and longest > many_parts:
        chunk = Int32(2)
    return chunk


@cute.jit
def _lens_of_lane(kv_lens: cute.Tensor):
    """The first ones of the lane's run of sequences."""
    run = (kv_lens.shape[0] + 31) // 32
    lens = cute.make_rmem_tensor(cute.make_layout(LENS_OF_LANE), Int32)
    lens.fill(0)
    for idx in cutlass.range_constexpr(LENS_OF_LANE):
        if idx < run:
            lens[idx] = _len_of(kv_lens, cute.arch.lane_idx() * run + idx)
    return lens


@cute.jit
def _first_boxes(
    box: cutlass.Constexpr,
    page_size: cutlass.Constexpr,
    page_table: cute.Tensor,
    kv_lens: cute.Tensor,
    work: cute.Tensor,
    layers: Int32,
    layer: Int32,
):
    """Where boxes lane and lane + 32 of the work lie in the cache, see mla_tiles.box_place, and the sequence's length.

    All are asked at once.
    """
    first, seq, before = work[0], work[2], work[3]
    places = cute.make_rmem_tensor(cute.make_layout(2), Int32)
    places.fill(0)
    kv_len = _len_of(kv_lens, seq)
    for idx in cutlass.range_constexpr(2):
        token = (first - before) * TILE + (cute.arch.lane_idx() + 32 * idx) * box
        page = token // page_size
        if token >= 0 and page < page_table.shape[1] and seq < kv_lens.shape[0]:
            entry = cute.domain_offset((seq, page), page_table).iterator
            slot = cute.arch.load(entry, Int32, sem="relaxed", scope="gpu") * layers + layer
            if token < kv_len:
                places[idx] = slot * (page_size // box) + token % page_size // box
    return places[0], places[1], kv_len


@cute.jit
def _len_of(kv_lens: cute.Tensor, seq: Int32) -> Int32:
    """0 beyond the last sequence."""
    kv_len = Int32(0)
    if seq < kv_lens.shape[0]:
        kv_len = cute.arch.load(kv_lens.iterator + seq, Int32, sem="relaxed", scope="gpu")
    return kv_len


@cute.jit
def _tiles_of(kv_lens: cute.Tensor, seq: Int32) -> Int32:
    """0 beyond the last sequence."""
    tiles = Int32(0)
    if seq < kv_lens.shape[0]:
        tiles = num_tiles(cute.arch.load(kv_lens.iterator + seq, Int32, sem="relaxed", scope="gpu"))
    return tiles
