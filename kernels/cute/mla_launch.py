"""The launch of a latent decode: shared memory, barriers, and who of a CTA does what.

Persistent CTAs of three warpgroups. In the first one warp plans the CTA's work (mla_plan) and keeps shared memory full
by TMA (mla_load, mla_load_pairs), and one is the clerk, which keeps count of the parts of sequences that were cut
(mla_clerk). The other two compute (mla_few_rows up to 32 query rows, mla_many_rows for 64; over a cache of E4M3
mla_narrow and mla_narrow_pairs) and merge those parts (mla_merge).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from dist_infer.kernels.cute import (
    mla_few_rows,
    mla_many_rows,
    mla_narrow,
    mla_narrow_pairs,
    mla_narrow_tiles,
    mla_operands,
    mla_shared_tiles,
)
from dist_infer.kernels.cute.mla_clerk import DUTY, keep_count
from dist_infer.kernels.cute.mla_load import load_first_queries, load_queries, load_tiles
from dist_infer.kernels.cute.mla_load_pairs import load_pairs
from dist_infer.kernels.cute.mla_merge import SCRATCH
from dist_infer.kernels.cute.mla_parts import parts_in
from dist_infer.kernels.cute.mla_plan import LENS_OF_LANE, confirm_plan, fetch_table, plan_ahead
from dist_infer.kernels.cute.mla_tiles import BLOCK, BLOCK_BYTES, NUM_BLOCKS, TILE, WIDTH, Task

DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
_THREADS = 384
_PLAN_BARRIER = 6
_TILES_AHEAD = 1  # that a CTA brings into the L2 cache while the launch before still runs
_MANY_PARTS = {False: 64, True: 16}  # of many rows a part is larger, see mla_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled apart. `rows` are the query rows of a CTA, padded; in pairs, two CTAs load for each other.

    A narrow one, never in pairs, reads a cache of E4M3, as 16-bit words of two; its products are rounded or not.
    """

    rows: int
    page_size: int
    dtype: torch.dtype
    pair: bool = False
    narrow: bool = False
    rounded: bool = False

    @property
    def many(self) -> bool:
        """64 rows share every tile between the warpgroups."""
        return self.rows == mla_shared_tiles.NUM_ROWS

    @property
    def staged(self) -> bool:
        """Tiles come into two stages, block by block, not into a ring of slots."""
        return self.many and not self.narrow

    @property
    def num_slots(self) -> int:
        """Of three blocks, those of two tiles, or of four where they are narrow; of 64 rows, blocks of two stages."""
        if self.staged:
            return mla_shared_tiles.NUM_STAGES * NUM_BLOCKS
        if self.narrow:
            return 11 if self.many else mla_narrow.NUM_SLOTS
        return mla_few_rows.NUM_SLOTS

    @property
    def query_parts(self) -> int:
        """E4M3 that a query is the sum of."""
        return 1 if self.rounded else 2

    @property
    def exchange_size(self) -> int:
        """Floats that the warpgroups of up to 32 rows give each other at once."""
        return 1 if self.many or self.narrow else 128 * self.rows * mla_few_rows.blocks_at_once(self.rows)

    @property
    def block_words(self) -> int:
        """Of 16 bits, in a row of a block as the cache has it."""
        return mla_operands.WORDS if self.narrow else BLOCK

    @property
    def box(self) -> int:
        """Tokens that one TMA load takes from a page."""
        return min(self.page_size, TILE)

    @property
    def box_blocks(self) -> int:
        """Blocks that one TMA load takes: a slot's where its tokens follow each other, else one."""
        return 1 if self.staged or self.box < TILE else mla_few_rows.SLOT_BLOCKS


class Launch:
    """The launch of a variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.dtype = DTYPES[variant.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache_rows: cute.Tensor,
        page_table: cute.Tensor,
        kv_lens: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        workspace: Int64,
        query_len: Int32,
        scale: Float32,
        num_workers: Int32,
        layers: Int32,
        layer: Int32,
        cache_scale: Int64,
        stream: driver.CUstream,
    ) -> None:
        v = self.variant
        n, slots = v.rows, v.num_slots
        heads = q.shape[1]
        rows = query_len * heads
        q, out = _flat(q), _flat(out)
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        cache_atom = k_atom
        if cutlass.const_expr(v.narrow):
            cache_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, self.dtype)
        mn_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, self.dtype)
        slot_blocks = 1 if v.staged else mla_few_rows.SLOT_BLOCKS
        num_blocks = slot_blocks * slots
        keys_layout = cute.tile_to_shape(cache_atom, (TILE, v.block_words * slot_blocks, slots), order=(0, 1, 2))
        values_layout = cute.tile_to_shape(mn_atom, (BLOCK, TILE, num_blocks), order=(1, 0, 2))
        boxes = (v.box, v.block_words, v.box_blocks, TILE // v.box, num_blocks // v.box_blocks)
        boxes_layout = cute.tile_to_shape(cache_atom, boxes, order=(0, 1, 2, 3, 4))
        queries_layout = cute.tile_to_shape(k_atom, (n, WIDTH), order=(0, 1))
        query_box_layout = cute.tile_to_shape(k_atom, (n, BLOCK, NUM_BLOCKS), order=(0, 1, 2))
        probabilities_layout = cute.tile_to_shape(k_atom, (n, TILE, 2), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_both = cpasync.CopyBulkTensorTileG2SMulticastOp()
        k_tma, k_coords = cpasync.make_tiled_tma_atom(
            load_both if v.pair else load,
            _in_blocks(cache_rows, v.block_words),
            cute.slice_(boxes_layout, (None, None, None, 0, 0)),
            boxes[:3],
        )
        q_tma, q_coords = cpasync.make_tiled_tma_atom(load, _in_blocks(q), query_box_layout, (n, BLOCK, NUM_BLOCKS))

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, slots]
            empty: cute.struct.MemRange[Int64, slots]
            q_full: cute.struct.MemRange[Int64, 1]
            q_empty: cute.struct.MemRange[Int64, 1]
            p_full: cute.struct.MemRange[Int64, 2]
            p_empty: cute.struct.MemRange[Int64, 2]
            work: cute.struct.MemRange[Int32, 8]
            duty: cute.struct.MemRange[Int32, DUTY[0] * DUTY[1]]
            maxima: cute.struct.MemRange[Float32, 1 if v.many else 16 * n]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, (6 if v.many else 12) * n], 16]
            exchange: cute.struct.Align[cute.struct.MemRange[Float32, v.exchange_size], 16]
            query_scales: cute.struct.MemRange[Float32, n]
            raised: cute.struct.MemRange[Int32, 8]
            probabilities: cute.struct.Align[
                cute.struct.MemRange[self.dtype, 1 if v.staged else cute.cosize(probabilities_layout)], 1024
            ]
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
            query_box_layout,
            probabilities_layout,
            cache_rows,
            page_table,
            kv_lens,
            out,
            lse,
            workspace,
            rows,
            row_tiles,
            heads,
            scale,
            layers,
            layer,
            cache_scale,
        ).launch(
            grid=[num_workers * row_tiles, 1, 1],
            block=[_THREADS, 1, 1],
            cluster=[2, 1, 1] if v.pair else [1, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
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
        query_box_layout: cute.ComposedLayout,
        probabilities_layout: cute.ComposedLayout,
        cache_rows: cute.Tensor,
        page_table: cute.Tensor,
        kv_lens: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        workspace: Int64,
        rows: Int32,
        row_tiles: Int32,
        heads: Int32,
        scale: Float32,
        layers: Int32,
        layer: Int32,
        cache_scale: Int64,
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
        p_full, p_empty = storage.p_full.data_ptr(), storage.p_empty.data_ptr()
        work = storage.work.get_tensor(cute.make_layout(8))
        keys = storage.keys.get_tensor(keys_layout.outer, swizzle=keys_layout.inner)
        boxes = cute.make_tensor(cute.recast_ptr(keys.iterator, boxes_layout.inner), boxes_layout.outer)
        queries = storage.queries.get_tensor(queries_layout.outer, swizzle=queries_layout.inner)
        query_box = cute.make_tensor(cute.recast_ptr(queries.iterator, query_box_layout.inner), query_box_layout.outer)
        probabilities = storage.probabilities.get_tensor(probabilities_layout.outer, swizzle=probabilities_layout.inner)
        if warp == 1:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(v.num_slots):
                    cute.arch.mbarrier_init(full + slot, 1)
                    cute.arch.mbarrier_init(empty + slot, 8 if v.pair or (v.many and v.narrow) else 4)
                for group in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(p_full + group, 4)
                    cute.arch.mbarrier_init(p_empty + group, 8)
                cute.arch.mbarrier_init(q_full, 1)
                cute.arch.mbarrier_init(q_empty, 8)
            cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(v.staged):
                with cute.arch.elect_one():
                    for slot in cutlass.range_constexpr(v.num_slots):
                        cute.arch.mbarrier_arrive_and_expect_tx(full + slot, BLOCK_BYTES)
        if cutlass.const_expr(v.pair):  # what one CTA loads comes to barriers of both
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if warp == 2:
            fetch_table(page_table, cta, num_ctas)
        guessed = cute.make_rmem_tensor(cute.make_layout(LENS_OF_LANE), Int32)
        if warp == 0:
            cpasync.prefetch_descriptor(k_tma)
            cpasync.prefetch_descriptor(q_tma)
            plan_ahead(
                v.box,
                v.page_size,
                _TILES_AHEAD,
                cache_rows,
                page_table,
                kv_lens,
                work,
                num_ctas // row_tiles,
                worker,
                _MANY_PARTS[v.many],
                layers,
                layer,
                guessed,
            )
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()  # lengths and tables may come from the launch before
        known, later, kv_len = Int32(0), Int32(0), Int32(0)
        if warp == 0:  # whose loads begin at once
            known, later, kv_len = confirm_plan(
                v.box,
                v.page_size,
                page_table,
                kv_lens,
                guessed,
                work,
                num_ctas // row_tiles,
                worker,
                _MANY_PARTS[v.many],
                layers,
                layer,
            )
            cute.arch.barrier_arrive(barrier_id=_PLAN_BARRIER, number_of_threads=_THREADS)
        else:
            cute.arch.barrier(barrier_id=_PLAN_BARRIER, number_of_threads=_THREADS)
        first, end, seq, before, chunk, total = (cute.arch.make_warp_uniform(work[place]) for place in range(6))
        cute.arch.griddepcontrol_launch_dependents()
        value_scale = Float32(1.0)
        if cutlass.const_expr(v.narrow):
            at = cute.make_ptr(Float32, cache_scale, cute.AddressSpace.gmem, assumed_align=4)
            value_scale = cute.make_tensor(at, cute.make_layout(1))[0]
            scale = scale * value_scale
        part_out, part_lse, states = parts_in(workspace, n, not v.staged, num_ctas)
        task = Task(
            page_table=page_table,
            kv_lens=kv_lens,
            out=out,
            lse=lse,
            part_out=part_out,
            part_lse=part_lse,
            states=states,
            rows=rows,
            row_tiles=row_tiles,
            row_tile=row_tile,
            heads=heads,
            scale=scale,
            value_scale=value_scale,
            layers=layers,
            layer=layer,
            worker=worker,
            first=first,
            end=end,
            seq=seq,
            before=before,
            chunk=chunk,
            total=total,
        )
        duty = storage.duty.get_tensor(cute.make_layout(DUTY))
        if warp < 4:
            cute.arch.setmaxregister_decrease(40 if v.narrow and n >= 32 else 56)
            if warp == 0:
                if cutlass.const_expr(v.staged):
                    load_pairs(
                        v.pair,
                        k_tma,
                        k_coords,
                        q_tma,
                        q_coords,
                        boxes,
                        query_box,
                        full,
                        empty,
                        q_full,
                        q_empty,
                        v.page_size,
                        known,
                        later,
                        kv_len,
                        task,
                    )
                else:
                    load_first_queries(q_tma, q_coords, query_box, q_full, task)
                    load_tiles(
                        k_tma,
                        k_coords,
                        boxes,
                        full,
                        empty,
                        v.page_size,
                        mla_few_rows.SLOT_BLOCKS,
                        mla_few_rows.SLOTS_OF_TILE,
                        v.num_slots,
                        known,
                        later,
                        kv_len,
                        task,
                    )
            if warp == 1:
                keep_count(task, duty)
            if cutlass.const_expr(not v.staged) and warp == 2:
                load_queries(q_tma, q_coords, query_box, q_full, q_empty, task)
        if warp >= 4:
            cute.arch.setmaxregister_increase(232 if v.narrow and n >= 32 else 224)
            queries_memory = cute.recast_ptr(storage.queries.data_ptr(), dtype=Float32)
            byte_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float8E4M3FN)
            byte_blocks = (TILE, BLOCK, mla_few_rows.SLOT_BLOCKS * v.num_slots)
            byte_layout = cute.tile_to_shape(byte_atom, byte_blocks, order=(0, 1, 2))
            part_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, Float8E4M3FN)
            part_layout = cute.tile_to_shape(part_atom, (n, 2 * BLOCK, NUM_BLOCKS), order=(0, 1, 2))
            bytes_of = cute.make_tensor(
                cute.recast_ptr(storage.keys.data_ptr(), byte_layout.inner, dtype=Float8E4M3FN), byte_layout.outer
            )
            parts_of_query = cute.make_tensor(
                cute.recast_ptr(storage.queries.data_ptr(), part_layout.inner, dtype=Float8E4M3FN), part_layout.outer
            )
            query_words = cute.make_tensor(
                cute.recast_ptr(storage.queries.data_ptr(), dtype=Int32), cute.make_layout(n * WIDTH // 2)
            )
            scratch = cute.make_tensor(queries_memory, cute.make_layout(SCRATCH))
            if cutlass.const_expr(v.staged):
                mla_many_rows.attend_many_rows(
                    v.pair,
                    keys,
                    queries,
                    storage.stats.get_tensor(cute.make_layout((2, 2, n), stride=(2 * n, n, 1))),
                    cute.make_tensor(storage.stats.data_ptr() + 4 * n, cute.make_layout((2, n), stride=(n, 1))),
                    full,
                    empty,
                    q_full,
                    q_empty,
                    p_full,
                    duty,
                    storage.queries.data_ptr(),
                    scratch,
                    task,
                )
            elif cutlass.const_expr(v.many):
                weights = _in_float16(storage.probabilities.data_ptr(), probabilities_layout)
                if cutlass.const_expr(v.rounded):
                    weights_layout = cute.tile_to_shape(byte_atom, (n, TILE, 2), order=(0, 1, 2))
                    weights = cute.make_tensor(
                        cute.recast_ptr(storage.probabilities.data_ptr(), weights_layout.inner, dtype=Float8E4M3FN),
                        weights_layout.outer,
                    )
                mla_narrow_pairs.attend_narrow_pairs(
                    v.query_parts,
                    v.num_slots,
                    storage.keys.data_ptr().toint(),
                    bytes_of,
                    parts_of_query,
                    query_words,
                    storage.query_scales.get_tensor(cute.make_layout(n)),
                    weights,
                    cute.make_tensor(queries_memory, cute.make_layout((2, n), stride=(n, 1))),
                    mla_narrow_tiles.Exchange(
                        shared=storage.stats.get_tensor(cute.make_layout((2, 2, n), stride=(2 * n, n, 1))),
                        raised=storage.raised.get_tensor(cute.make_layout((4, 2))),
                        full=full,
                        empty=empty,
                        p_full=p_full,
                        p_empty=p_empty,
                    ),
                    q_full,
                    q_empty,
                    duty,
                    scratch,
                    task,
                )
            elif cutlass.const_expr(v.narrow):
                mla_narrow.attend_narrow(
                    n,
                    v.query_parts,
                    v.num_slots,
                    storage.keys.data_ptr(),
                    bytes_of,
                    parts_of_query,
                    query_words,
                    storage.query_scales.get_tensor(cute.make_layout(n)),
                    _in_float16(storage.probabilities.data_ptr(), probabilities_layout),
                    storage.probabilities.data_ptr(),
                    storage.maxima.get_tensor(cute.make_layout((2, 2, 4, n), stride=(8 * n, 4 * n, n, 1))),
                    storage.stats.get_tensor(cute.make_layout((2, 5, n), stride=(5 * n, n, 1))),
                    cute.make_tensor(queries_memory, cute.make_layout((128, n // 2, 2, 2))),
                    full,
                    empty,
                    q_full,
                    q_empty,
                    duty,
                    scratch,
                    task,
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
                    storage.stats.get_tensor(cute.make_layout((12, n))),
                    storage.exchange.get_tensor(cute.make_layout((4, 128, v.exchange_size // 1024, 2))),
                    full,
                    empty,
                    q_full,
                    q_empty,
                    duty,
                    scratch,
                    task,
                )
        if cutlass.const_expr(v.pair):  # memory and barriers stay while the other CTA uses them
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def _in_float16(memory: cute.Pointer, layout: cute.ComposedLayout) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(memory, layout.inner, dtype=cutlass.Float16), layout.outer)


@cute.jit
def _in_blocks(rows: cute.Tensor, block: cutlass.Constexpr = BLOCK) -> cute.Tensor:
    """[row, column] as [row, column of a block, block]."""
    count = cutlass.const_expr(rows.shape[1] // block)
    layout = cute.make_layout((rows.shape[0], block, count), stride=(rows.stride[0], 1, block))
    return cute.make_tensor(rows.iterator, layout)


@cute.jit
def _flat(rows: cute.Tensor) -> cute.Tensor:
    """[token, head, column] as [row, column]."""
    width = cutlass.const_expr(rows.shape[2])
    layout = cute.make_layout((rows.shape[0] * rows.shape[1], width), stride=(width, 1))
    return cute.make_tensor(rows.iterator, layout)
