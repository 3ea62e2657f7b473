"""Matrix products over the pairs of each expert with its weights, in CuTe DSL for sm_90a.

Persistent CTAs: one warpgroup loads, one or two multiply. The products are transposed: 128 rows of weights for each
warpgroup that multiplies are the rows of the matrix instruction and pairs its columns, so a tile has as many columns
as an expert needs (see moe_schedule) and little is computed in vain. Weights come by TMA, for two CTAs at a time where
both need them; rows of the gate and up product are gathered from where they stand, those of the down product stand in
the order of the experts and come by TMA. The shapes are run-time data, so all models share the variants.

R rows, K experts a row, P = R K pairs, E experts, D model, I intermediate channels.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver
from cutlass import Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from torch import Tensor

from dist_infer.kernels.cute.compile_cache import load_or_compile
from dist_infer.kernels.cute.grouped_gemm_load import load_gathered, load_in_order
from dist_infer.kernels.cute.grouped_gemm_multiply import multiply
from dist_infer.kernels.cute.grouped_gemm_parts import DEPTH, NUMBERS, PASS_BYTES, STEP, Variant
from dist_infer.kernels.cute.moe_order import MAX_ORDERED, plan_pairs
from dist_infer.kernels.cute.moe_schedule import MAX_EXPERTS, TABLE_LEN, make_tables, plan_tiles
from dist_infer.kernels.multiprocessors import num_multiprocessors

_GATHERERS = 128


def gate_up(x: Tensor, weight: Tensor, order: Tensor, firsts: Tensor, top_k: int, variant: Variant) -> Tensor:
    """The activation of all pairs in the order of their experts, rounded to the dtype of x.

    Shapes: x [R, D], weight [E, 2 * I, D], the gates first, order [P] int32 pairs r K + k expert by expert, firsts
        [E + 1] int32 where each expert's begin -> [P, I]; rows behind those of all experts are not written. For a
        variant that `orders` the ids [P] int32 of up to MAX_ORDERED pairs stand for both; what is no expert held has no
        place.
    Stream: the current one; the host waits for nothing, and a CUDA graph may hold it.
    Errors: ValueError for dtypes, and sizes that aren't multiples of 64.
    """
    _check("gate_up", x, weight, order, weight.shape[1] // 2, variant)
    _, two_inner, width = weight.shape
    out = x.new_empty(len(order), two_inner // 2)
    inner = two_inner // 2
    sizes = (top_k, inner, inner, len(weight), num_multiprocessors(x.device))
    compiled(variant)(x, weight.view(-1, width), order, firsts, out, *sizes)
    return out


def down(hidden: Tensor, weight: Tensor, order: Tensor, firsts: Tensor, variant: Variant) -> Tensor:
    """The output of every pair, rounded to the dtype of `hidden`; pair r K + k stands in that row.

    Shapes: hidden [P, I] in the order of the experts, weight [E, D, I], order and firsts as of gate_up -> [P, D]; rows
        of pairs that no expert has are not set.
    Stream: as of gate_up.
    Errors: as of gate_up.
    """
    _check("down", hidden, weight, order, weight.shape[1], variant)
    _, width, inner = weight.shape
    out = hidden.new_empty(len(order), width)
    sizes = (1, width, variant.box, len(weight), num_multiprocessors(hidden.device))
    compiled(variant)(hidden, weight.view(-1, inner), order, firsts, out, *sizes)
    return out


def _check(name: str, rows: Tensor, weight: Tensor, order: Tensor, channels: int, variant: Variant) -> None:
    if variant.orders and (len(order) > MAX_ORDERED or variant.sorts):
        raise ValueError(f"{name}: {len(order)} pairs are not in order, {MAX_ORDERED} in short tiles can be")
    fits = (
        rows.dtype == weight.dtype == variant.dtype
        and rows.dtype in NUMBERS
        and rows.shape[1] == weight.shape[2]
        and not rows.shape[1] % (variant.pieces * DEPTH if variant.gate_up else DEPTH)
        and not channels % DEPTH
        and len(weight) <= MAX_EXPERTS
        and rows.is_contiguous()
        and weight.is_contiguous()
    )
    if not fits:
        raise ValueError(
            f"{name}: rows {rows.dtype} {list(rows.shape)} and weights {weight.dtype} {list(weight.shape)} are not"
            f" contiguous, of one 16-bit dtype, in multiples of {DEPTH} channels and at most {MAX_EXPERTS} experts"
        )


@cache
def compiled(variant: Variant, options: str = "") -> Callable[..., Any]:
    """The launch of a variant, on the current CUDA device and from the cache unless `options` compile it anew."""
    if not options:
        return load_or_compile("grouped_gemm", repr(variant), lambda: _compile(variant))
    launch: Callable[..., Any] = _compile(variant, options)
    return launch


def _compile(variant: Variant, options: str = "") -> Any:
    dtype = variant.number

    def matrix() -> Any:
        columns = cute.sym_int(divisibility=8)
        stride = cute.sym_int64(divisibility=8)
        return make_fake_tensor(dtype, (cute.sym_int(), columns), (stride, 1), assumed_align=16)

    return cute.compile(
        _Launch(variant),
        matrix(),
        matrix(),
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4),
        make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4),
        matrix(),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}",
    )


class _Launch:
    """The launch of a variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        weight: cute.Tensor,
        order: cute.Tensor,
        firsts: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
        channels: Int32,  # of the output
        second_box: Int32,  # rows of weights from the first box to the second
        num_experts: Int32,
        num_ctas: Int32,
        stream: driver.CUstream,
    ) -> None:
        v = self.variant
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, v.number)
        weights_layout = cute.tile_to_shape(k_atom, (v.box, DEPTH, 2 * v.pieces * v.num_stages), order=(0, 1, 2))
        rows_layout = cute.tile_to_shape(k_atom, (v.pairs, DEPTH, v.pieces * v.num_stages), order=(0, 1, 2))
        boxes_layout = cute.tile_to_shape(
            k_atom, (STEP, DEPTH, v.pairs // STEP, v.pieces * v.num_stages), order=(0, 1, 2, 3)
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        w_tma, w_coords = cpasync.make_tiled_tma_atom(
            load if v.cluster == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp(),
            weight,
            cute.slice_(weights_layout, (None, None, 0)),
            (v.box, DEPTH),
        )
        r_tma, r_coords = cpasync.make_tiled_tma_atom(
            load, rows, cute.slice_(boxes_layout, (None, None, 0, 0)), (STEP, DEPTH)
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, v.num_stages]
            empty: cute.struct.MemRange[Int64, v.num_stages]
            tables: cute.struct.Align[cute.struct.MemRange[Int32, 4 * TABLE_LEN], 16]
            order: cute.struct.MemRange[Int16, MAX_ORDERED if v.orders else 2]
            passing: cute.struct.Align[
                cute.struct.MemRange[v.number, v.num_groups * v.num_passes * PASS_BYTES // 2], 1024
            ]
            rows: cute.struct.Align[cute.struct.MemRange[v.number, cute.cosize(rows_layout)], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[v.number, cute.cosize(weights_layout)], 1024]

        self.storage = Storage
        self._multiply(
            w_tma,
            w_coords,
            r_tma,
            r_coords,
            weights_layout,
            rows_layout,
            boxes_layout,
            rows,
            order,
            firsts,
            out,
            top_k,
            channels,
            second_box,
            num_experts,
        ).launch(
            grid=[num_ctas // v.cluster * v.cluster, 1, 1],
            block=[v.num_threads, 1, 1],
            cluster=[v.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def _multiply(
        self,
        w_tma: cute.CopyAtom,
        w_coords: cute.Tensor,
        r_tma: cute.CopyAtom,
        r_coords: cute.Tensor,
        weights_layout: cute.ComposedLayout,
        rows_layout: cute.ComposedLayout,
        boxes_layout: cute.ComposedLayout,
        rows: cute.Tensor,
        order: cute.Tensor,
        firsts: cute.Tensor,
        out: cute.Tensor,
        top_k: Int32,
        channels: Int32,
        second_box: Int32,
        num_experts: Int32,
    ) -> None:
        v = self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        tables = make_tables(storage.tables.data_ptr())
        weights = storage.weights.get_tensor(weights_layout.outer, swizzle=weights_layout.inner)
        row_tiles = storage.rows.get_tensor(rows_layout.outer, swizzle=rows_layout.inner)
        boxes = cute.make_tensor(cute.recast_ptr(row_tiles.iterator, boxes_layout.inner), boxes_layout.outer)
        if warp == 0:
            cpasync.prefetch_descriptor(w_tma)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(v.num_stages):
                    cute.arch.mbarrier_init(full + stage, 1 + (_GATHERERS if v.gate_up else 0))
                    cute.arch.mbarrier_init(empty + stage, 4 * v.num_groups * v.cluster)  # the warps that multiply
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(v.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        per_block = cutlass.const_expr(v.box if v.gate_up else 2 * v.box)
        channel_blocks = (channels + per_block - 1) // per_block
        if cutlass.const_expr(v.gate_up):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # Without gate_up nothing but `rows` is of the launch before: see dependent_launch.
        if cutlass.const_expr(v.orders):
            ids, order = order, storage.order.get_tensor(cute.make_layout(MAX_ORDERED))
            scratch = cute.recast_ptr(storage.weights.data_ptr(), dtype=Int32)
            plan_pairs(ids, num_experts, order, scratch, tables, channel_blocks, v.pairs)
        else:
            plan_tiles(firsts, tables, channel_blocks, v.pairs, v.sorts, v.cluster)
        num_tiles = tables[0][MAX_EXPERTS]
        depth = (cute.size(rows, mode=[1]) + v.pieces * DEPTH - 1) // (v.pieces * DEPTH)
        expert_rows = cute.size(w_coords, mode=[0]) // num_experts
        if warp < 4:
            cute.arch.setmaxregister_decrease(v.registers[0])
            if cutlass.const_expr(v.gate_up):
                load_gathered(
                    v,
                    w_tma,
                    w_coords,
                    weights,
                    row_tiles,
                    rows,
                    order,
                    tables,
                    full,
                    empty,
                    top_k,
                    channel_blocks,
                    second_box,
                    expert_rows,
                    num_tiles,
                    depth,
                )
            elif warp == 0:
                load_in_order(
                    v,
                    w_tma,
                    w_coords,
                    r_tma,
                    r_coords,
                    weights,
                    boxes,
                    tables,
                    full,
                    empty,
                    channel_blocks,
                    second_box,
                    expert_rows,
                    num_tiles,
                    depth,
                )
        else:
            cute.arch.setmaxregister_increase(v.registers[1])
            multiply(
                v,
                weights,
                row_tiles,
                storage.passing.data_ptr(),
                order,
                out,
                tables,
                full,
                empty,
                channels,
                channel_blocks,
                num_tiles,
                depth,
            )
        if cutlass.const_expr(v.cluster > 1):  # nobody leaves whose memory is still written to
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
