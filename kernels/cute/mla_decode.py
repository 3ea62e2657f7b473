"""Latent decode over a paged cache in CuTe DSL for sm_90a: no public one is known for this architecture.

Persistent CTAs of three warpgroups: one warp keeps shared memory full by TMA, two warpgroups compute (see mla_few_rows
up to 32 query rows a sequence, mla_many_rows above). How the work is shared is in mla_tiles; the parts of sequences
that were cut are merged by a second, dependent launch (mla_merge). Lengths, pages, heads and query tokens are run-time
data, so a model needs one variant for each of its numbers of query rows.

S sequences, Q query tokens of each, N heads, C slots of the cache, P pages of the longest sequence, W CTAs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from torch import Tensor

from dist_infer.kernels.cute import mla_few_rows, mla_many_rows
from dist_infer.kernels.cute.compile_cache import load_or_compile
from dist_infer.kernels.cute.mla_merge import NUM_WARPS as MERGE_WARPS
from dist_infer.kernels.cute.mla_merge import merge_parts
from dist_infer.kernels.cute.mla_tiles import BLOCK, LATENT, NUM_BLOCKS, TILE, WIDTH, box_place, plan_work, tiles_of

PAGE_SIZES = (16, 32, 64, 128)
ROW_COUNTS = (8, 16, 32, mla_many_rows.NUM_ROWS)
MAX_HEADS = 128
_DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
_THREADS = 384
_MERGE_CTAS = 528  # four on each of 132 multiprocessors


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled apart. `rows` are the query rows of a CTA, padded."""

    rows: int
    page_size: int
    dtype: torch.dtype

    @property
    def many(self) -> bool:
        """64 rows share every tile between the warpgroups."""
        return self.rows == mla_many_rows.NUM_ROWS

    @property
    def slot_blocks(self) -> int:
        """Blocks of 64 columns that have a barrier together."""
        return 1 if self.many else mla_few_rows.SLOT_BLOCKS

    @property
    def num_slots(self) -> int:
        """As many as shared memory holds beside the queries."""
        if self.many:
            return mla_many_rows.NUM_STAGES * NUM_BLOCKS
        return 8 if self.rows <= 16 else 7

    @property
    def first_block(self) -> int:
        """The block of columns that is loaded first: the rotated keys where they have a slot of their own."""
        return NUM_BLOCKS - 1 if self.many else 0

    @property
    def box(self) -> int:
        """Tokens that one TMA load takes from a page."""
        return min(self.page_size, TILE)


def choose_rows(rows: int) -> int:
    """The padded query rows of a CTA for so many rows a sequence."""
    return next((count for count in ROW_COUNTS if rows <= count), ROW_COUNTS[-1])


class Workspace:
    """Parts of sequences, for any batch: it depends on the multiprocessors alone. Units: rows of a CTA.

    Shapes: out [2 W, rows, 512] and lse [2 W, rows] float32.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.num_ctas = torch.cuda.get_device_properties(device).multi_processor_count
        self.out = torch.empty(2 * self.num_ctas, rows, LATENT, dtype=torch.float32, device=device)
        self.lse = torch.empty(2 * self.num_ctas, rows, dtype=torch.float32, device=device)


def mla_decode(
    q: Tensor,
    cache_rows: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_size: int,
    query_len: int,
    scale: float,
    workspace: Workspace,
    out: Tensor,
) -> Tensor:
    """Fills `out` with the attended latents; the base-2 logarithm of each row's sum of exponentials.

    The `query_len` last tokens of each sequence are the queries: token t of them sees kv_len - query_len + 1 + t keys.
    Products of two 16-bit numbers are summed in float32, weights are rounded to the dtype of the cache. A row that sees
    no key gives 0 and -inf. What lies beyond kv_len never shows.

    Shapes: q [S * Q, N, 576] (folded latent, rotated), cache_rows [C, 576], page_table [S, P] int32 logical page ids,
        kv_lens [S] int32, out [S * Q, N, 512] -> [S * Q * N] float32.
    Stream: the current one; the host waits for nothing, and a CUDA graph may hold it.
    Errors: ValueError for shapes, dtypes or page sizes that no variant takes.
    """
    num_tokens, heads, width = q.shape
    rows = query_len * heads
    fits = (
        page_size in PAGE_SIZES
        and width == cache_rows.shape[1] == WIDTH
        and q.dtype == cache_rows.dtype == out.dtype
        and q.dtype in _DTYPES
        and heads <= MAX_HEADS
        and num_tokens == len(kv_lens) * query_len
        and out.shape == (num_tokens, heads, LATENT)
        and q.is_contiguous()
        and out.is_contiguous()
    )
    if not fits:
        raise ValueError(
            f"mla_decode: q {q.dtype} {list(q.shape)}, cache {cache_rows.dtype} {list(cache_rows.shape)}, out"
            f" {list(out.shape)}, {len(kv_lens)} sequences of {query_len} queries or pages of {page_size} don't fit"
        )
    padded = choose_rows(rows)
    run = compiled(Variant(rows=padded, page_size=page_size, dtype=q.dtype))
    lse = torch.empty(num_tokens * heads, dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return lse
    parts = torch.empty(len(kv_lens), 2, dtype=torch.int32, device=q.device)
    run(
        q.view(-1, WIDTH),
        cache_rows,
        page_table,
        kv_lens,
        out.view(-1, LATENT),
        lse,
        workspace.out,
        workspace.lse,
        parts,
        rows,
        heads,
        scale * math.log2(math.e),
        workspace.num_ctas // -(-rows // padded),
    )
    return lse


@cache
def compiled(variant: Variant, options: str = "") -> Callable[..., Any]:
    """The launch of a variant, on the current CUDA device and from the cache unless `options` compile it anew."""
    if not options:
        return load_or_compile("mla_decode", repr(variant), lambda: _compile(variant))
    launch: Callable[..., Any] = _compile(variant, options)
    return launch


def _compile(variant: Variant, options: str = "") -> Any:
    dtype = _DTYPES[variant.dtype]
    by_row = {"stride_order": (1, 0)}
    num_seqs = cute.sym_int()
    return cute.compile(
        _Launch(variant),
        make_fake_compact_tensor(dtype, (cute.sym_int(), WIDTH), assumed_align=16, **by_row),
        make_fake_tensor(dtype, (cute.sym_int(), WIDTH), (cute.sym_int64(divisibility=8), 1), assumed_align=16),
        make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4),
        make_fake_compact_tensor(Int32, (num_seqs,), assumed_align=4),
        make_fake_compact_tensor(dtype, (cute.sym_int(), LATENT), assumed_align=16, **by_row),
        make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4),
        make_fake_compact_tensor(
            Float32, (cute.sym_int(), variant.rows, LATENT), stride_order=(2, 1, 0), assumed_align=16
        ),
        make_fake_compact_tensor(Float32, (cute.sym_int(), variant.rows), assumed_align=4, **by_row),
        make_fake_compact_tensor(Int32, (cute.sym_int(), 2), assumed_align=8, **by_row),
        Int32(1),
        Int32(1),
        Float32(1.0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}",
    )


class _Launch:
    """Both launches of a variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.dtype = _DTYPES[variant.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache_rows: cute.Tensor,
        page_table: cute.Tensor,
        kv_lens: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        parts: cute.Tensor,
        rows: Int32,
        heads: Int32,
        scale: Float32,
        num_workers: Int32,
        stream: driver.CUstream,
    ) -> None:
        v = self.variant
        n, slots = v.rows, v.num_slots
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        mn_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.dtype)
        num_blocks = v.slot_blocks * slots
        keys_layout = cute.tile_to_shape(k_atom, (TILE, BLOCK * v.slot_blocks, slots), order=(0, 1, 2))
        values_layout = cute.tile_to_shape(mn_atom, (BLOCK, TILE, num_blocks), order=(1, 0, 2))
        boxes_layout = cute.tile_to_shape(k_atom, (v.box, BLOCK, TILE // v.box, num_blocks), order=(0, 1, 2, 3))
        queries_layout = cute.tile_to_shape(k_atom, (n, WIDTH), order=(0, 1))
        query_boxes_layout = cute.tile_to_shape(k_atom, (n, BLOCK, NUM_BLOCKS), order=(0, 1, 2))
        probabilities_layout = cute.tile_to_shape(k_atom, (n, TILE, 1 if v.many else 2), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        k_tma, k_coords = cpasync.make_tiled_tma_atom(
            load, cache_rows, cute.slice_(boxes_layout, (None, None, 0, 0)), (v.box, BLOCK)
        )
        q_tma, q_coords = cpasync.make_tiled_tma_atom(
            load, q, cute.slice_(query_boxes_layout, (None, None, 0)), (n, BLOCK)
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, slots]
            empty: cute.struct.MemRange[Int64, slots]
            q_full: cute.struct.MemRange[Int64, 1]
            q_empty: cute.struct.MemRange[Int64, 1]
            p_full: cute.struct.MemRange[Int64, 2]
            work: cute.struct.MemRange[Int32, 8]
            maxima: cute.struct.MemRange[Float32, 1 if v.many else 16 * n]
            stats: cute.struct.MemRange[Float32, (4 if v.many else 10) * n]
            probabilities: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(probabilities_layout)], 1024]
            queries: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(queries_layout)], 1024]
            keys: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(keys_layout)], 1024]

        self.storage = Storage
        row_tiles = (rows + n - 1) // n
        self._decode(
            k_tma,
            k_coords,
            q_tma,
            q_coords,
            keys_layout,
            values_layout,
            boxes_layout,
            queries_layout,
            query_boxes_layout,
            probabilities_layout,
            page_table,
            kv_lens,
            out,
            lse,
            part_out,
            part_lse,
            parts,
            rows,
            row_tiles,
            heads,
            scale,
        ).launch(
            grid=[num_workers * row_tiles, 1, 1],
            block=[_THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
        num_seqs = kv_lens.shape[0]
        merge_ctas = cutlass.min(rows * 4, cutlass.max(Int32(_MERGE_CTAS) // num_seqs, Int32(1)))
        self._merge(part_out, part_lse, parts, out, lse, rows, row_tiles).launch(
            grid=[merge_ctas, num_seqs, 1], block=[32 * MERGE_WARPS, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def _decode(
        self,
        k_tma: cute.CopyAtom,
        k_coords: cute.Tensor,
        q_tma: cute.CopyAtom,
        q_coords: cute.Tensor,
        keys_layout: cute.ComposedLayout,
        values_layout: cute.ComposedLayout,
        boxes_layout: cute.ComposedLayout,
        queries_layout: cute.ComposedLayout,
        query_boxes_layout: cute.ComposedLayout,
        probabilities_layout: cute.ComposedLayout,
        page_table: cute.Tensor,
        kv_lens: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        parts: cute.Tensor,
        rows: Int32,
        row_tiles: Int32,
        heads: Int32,
        scale: Float32,
    ) -> None:
        v = self.variant
        n = v.rows
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        row_tile, worker = cta % row_tiles, cta // row_tiles
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        p_full = storage.p_full.data_ptr()
        work = storage.work.get_tensor(cute.make_layout(8))
        keys = storage.keys.get_tensor(keys_layout.outer, swizzle=keys_layout.inner)
        boxes = cute.make_tensor(cute.recast_ptr(keys.iterator, boxes_layout.inner), boxes_layout.outer)
        queries = storage.queries.get_tensor(queries_layout.outer, swizzle=queries_layout.inner)
        query_boxes = cute.make_tensor(
            cute.recast_ptr(queries.iterator, query_boxes_layout.inner), query_boxes_layout.outer
        )
        probabilities = storage.probabilities.get_tensor(probabilities_layout.outer, swizzle=probabilities_layout.inner)
        if warp == 0:
            cpasync.prefetch_descriptor(k_tma)
            cpasync.prefetch_descriptor(q_tma)
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(v.num_slots):
                    cute.arch.mbarrier_init(full + slot, 1)
                    cute.arch.mbarrier_init(empty + slot, 4)  # the warps of a warpgroup
                for group in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(p_full + group, 4)
                cute.arch.mbarrier_init(q_full, 1)
                cute.arch.mbarrier_init(q_empty, 8)
            cute.arch.mbarrier_init_fence()
        cute.arch.griddepcontrol_wait()  # lengths and tables may come from the launch before
        if warp == 1:
            plan_work(kv_lens, work, num_ctas // row_tiles, worker)
        cute.arch.sync_threads()
        first, end, seq, before, chunk = (cute.arch.make_warp_uniform(work[place]) for place in range(5))
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(24)
            if warp == 0:
                self._load(
                    k_tma,
                    k_coords,
                    q_tma,
                    q_coords,
                    boxes,
                    query_boxes,
                    page_table,
                    kv_lens,
                    full,
                    empty,
                    q_full,
                    q_empty,
                    rows,
                    row_tile,
                    first,
                    end,
                    seq,
                    before,
                )
        else:
            cute.arch.setmaxregister_increase(240)
            queries_memory = cute.recast_ptr(storage.queries.data_ptr(), dtype=Float32)
            if cutlass.const_expr(v.many):
                mla_many_rows.attend_many_rows(
                    keys,
                    queries,
                    probabilities,
                    storage.stats.get_tensor(cute.make_layout((2, 2, n), stride=(2 * n, n, 1))),
                    cute.make_tensor(queries_memory, cute.make_layout((2, n), stride=(n, 1))),
                    full,
                    empty,
                    q_full,
                    q_empty,
                    p_full,
                    kv_lens,
                    out,
                    lse,
                    part_out,
                    part_lse,
                    parts,
                    rows,
                    row_tiles,
                    row_tile,
                    heads,
                    scale,
                    first,
                    end,
                    seq,
                    before,
                    chunk,
                    worker,
                )
            else:
                mla_few_rows.attend_few_rows(
                    n,
                    v.num_slots,
                    keys,
                    cute.make_tensor(cute.recast_ptr(keys.iterator, values_layout.inner), values_layout.outer),
                    queries,
                    probabilities,
                    storage.maxima.get_tensor(cute.make_layout((2, 2, 4, n), stride=(8 * n, 4 * n, n, 1))),
                    storage.stats.get_tensor(cute.make_layout((2, 5, n), stride=(5 * n, n, 1))),
                    cute.make_tensor(queries_memory, cute.make_layout((128, n // 2, 2))),
                    full,
                    empty,
                    q_full,
                    q_empty,
                    kv_lens,
                    out,
                    lse,
                    part_out,
                    part_lse,
                    parts,
                    rows,
                    heads,
                    scale,
                    first,
                    end,
                    seq,
                    before,
                    chunk,
                    worker,
                )

    @cute.jit
    def _load(
        self,
        k_tma: cute.CopyAtom,
        k_coords: cute.Tensor,
        q_tma: cute.CopyAtom,
        q_coords: cute.Tensor,
        boxes: cute.Tensor,
        query_boxes: cute.Tensor,
        page_table: cute.Tensor,
        kv_lens: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        q_full: cute.Pointer,
        q_empty: cute.Pointer,
        rows: Int32,
        row_tile: Int32,
        first: Int32,
        end: Int32,
        seq: Int32,
        before: Int32,
    ) -> None:
        """The producer warp: each sequence's queries, then its tiles as slots become free. Lane i knows box i of 32."""
        v = self.variant
        lane = cute.arch.lane_idx()
        boxes_of_tile = cutlass.const_expr(TILE // v.box)
        cache_boxes = cute.local_tile(k_coords, (v.box, BLOCK), (None, None))
        k_to, k_from = cpasync.tma_partition(
            k_tma, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(cache_boxes, 0, 2)
        )
        places = cute.make_rmem_tensor(cute.make_layout(boxes_of_tile), Int32)
        slot = Int32(0)
        phase, q_phase = Int32(1), Int32(1)  # the phase before the first counts as done
        while first < end:
            tiles = tiles_of(kv_lens, seq)
            tile = first - before
            stop = cutlass.min(end - before, tiles)
            kv_len = kv_lens[seq]
            cute.arch.mbarrier_wait(q_empty, q_phase)
            q_phase ^= 1
            own_rows = cute.domain_offset((seq * rows + row_tile * v.rows, 0), q_coords)
            own_boxes = cute.local_tile(own_rows, (v.rows, BLOCK), (0, None))
            q_to, q_from = cpasync.tma_partition(
                q_tma, 0, cute.make_layout(1), cute.group_modes(query_boxes, 0, 2), cute.group_modes(own_boxes, 0, 2)
            )
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_full, v.rows * WIDTH * 2)
            for block in cutlass.range_constexpr(NUM_BLOCKS):
                cute.copy(q_tma, q_from[(None, block)], q_to[(None, block)], tma_bar_ptr=q_full)
            box_idx = tile * boxes_of_tile
            base = box_idx
            known = box_place(page_table, seq, kv_len, base + lane, v.box, v.page_size)
            while tile < stop:
                for segment in cutlass.range_constexpr(boxes_of_tile):
                    if box_idx - base == 32:
                        base = box_idx
                        known = box_place(page_table, seq, kv_len, base + lane, v.box, v.page_size)
                    places[segment] = cute.arch.shuffle_sync(known, box_idx - base)
                    box_idx += 1
                for part in cutlass.range_constexpr(NUM_BLOCKS // v.slot_blocks):
                    cute.arch.mbarrier_wait(empty + slot, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, v.slot_blocks * TILE * BLOCK * 2)
                    for idx in cutlass.range_constexpr(v.slot_blocks):
                        block = cutlass.const_expr((part * v.slot_blocks + idx + v.first_block) % NUM_BLOCKS)
                        for segment in cutlass.range_constexpr(boxes_of_tile):
                            cute.copy(
                                k_tma,
                                k_from[(None, places[segment], block)],
                                k_to[(None, segment, slot * v.slot_blocks + idx)],
                                tma_bar_ptr=full + slot,
                            )
                    slot += 1
                    if slot == v.num_slots:
                        slot = Int32(0)
                        phase ^= 1
                tile += 1
            first = before + stop
            before += tiles
            seq += 1

    @cute.kernel
    def _merge(
        self,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        parts: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        rows: Int32,
        row_tiles: Int32,
    ) -> None:
        merge_parts(part_out, part_lse, parts, out, lse, rows, row_tiles)
