"""Matrix products over the pairs of each expert with its quantised weights, in CuTe DSL for sm_90a.

As grouped_gemm, whose weights aren't quantised: persistent CTAs, one warpgroup loads and one or two multiply, products
are transposed. FP8 rows meet FP8 weights in the matrix units, block by block of their scales; MXFP8 and NVFP4 weights
are dequantised on their way there. The loading threads copy rows and scales of both products from where they stand.

R rows, K experts a row, P = R K pairs, E experts, D model, I intermediate channels.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import BFloat16, Float32, Int16, Int32, Int64, Uint8
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Scaling, Fp8Tensor, Nvfp4Tensor, QuantizedTensor
from dist_infer.kernels.cute.compile_cache import load_or_compile
from dist_infer.kernels.cute.moe_order import MAX_ORDERED, plan_pairs
from dist_infer.kernels.cute.moe_schedule import MAX_EXPERTS, TABLE_LEN, make_tables, plan_tiles
from dist_infer.kernels.cute.quantized_load import load
from dist_infer.kernels.cute.quantized_multiply import multiply
from dist_infer.kernels.cute.quantized_parts import DEPTH, ROW_BYTES, Variant
from dist_infer.kernels.multiprocessors import num_multiprocessors
from dist_infer.kernels.scaled_linear import WeightFormat


def gate_up(
    x: Tensor | Fp8Tensor,
    weight: QuantizedTensor,
    num_experts: int,
    order: Tensor,
    firsts: Tensor,
    top_k: int,
    variant: Variant,
    *,
    starts_early: bool = False,
) -> Tensor | Fp8Tensor:
    """The activation of all pairs in the order of their experts, rounded to bfloat16, then 1 x 128 if `quantizes`.

    With MXFP8 and NVFP4 weights x and the result have their channels in places (see triton/channel_places).

    Shapes: x [R, D], weight [E * 2 * I, D], each expert's gates first, order [P] int32 pairs r K + k expert by expert,
        firsts [E + 1] int32 where each expert's begin -> [P, I]; rows behind those of all experts are not written. For
        a variant that `orders` the ids [P] int32 of up to MAX_ORDERED pairs stand for both; what is no expert held has
        no place.
    Stream: the current one; the host waits for nothing, and a CUDA graph may hold it. `starts_early`: the kernel in
        front has written x alone, and calls wait_for_inputs (see triton/dependent_launch).
    Errors: ValueError for dtypes, and sizes that aren't multiples of 128.
    """
    inner = weight.shape[0] // num_experts // 2
    _check("gate_up", x, weight, num_experts, order, inner, variant)
    if variant.quantizes:
        narrow = Fp8Tensor.empty(len(order), inner, Fp8Scaling.BLOCKS_1X128, device=order.device)
        outputs = narrow.data.view(torch.uint8), narrow.scales
        _run(variant, x, weight, order, firsts, outputs, (top_k, inner, inner, num_experts, int(starts_early)))
        return narrow
    out = torch.empty(len(order), inner, dtype=torch.bfloat16, device=order.device)
    _run(variant, x, weight, order, firsts, (out, None), (top_k, inner, inner, num_experts, int(starts_early)))
    return out


def down(
    hidden: Tensor | Fp8Tensor,
    weight: QuantizedTensor,
    num_experts: int,
    order: Tensor,
    firsts: Tensor,
    variant: Variant,
) -> Tensor:
    """The output of every pair, rounded to bfloat16; pair r K + k stands in that row.

    Shapes: hidden [P, I] in the order of the experts, as gate_up left it, weight [E * D, I], order and firsts as there
        -> [P, D]; rows of pairs that no expert has are not set.
    Stream: as of gate_up.
    Errors: as of gate_up.
    """
    width = weight.shape[0] // num_experts
    _check("down", hidden, weight, num_experts, order, width, variant)
    out = torch.empty(len(order), width, dtype=torch.bfloat16, device=order.device)
    _run(variant, hidden, weight, order, firsts, (out, None), (1, width, variant.box, num_experts, 1))
    return out


def format_of(weight: QuantizedTensor) -> WeightFormat:
    """As such products take it."""
    if isinstance(weight, Nvfp4Tensor):
        return WeightFormat.NVFP4
    return WeightFormat.FP8_BLOCK if isinstance(weight, Fp8Tensor) else WeightFormat.MXFP8


def _check(
    name: str,
    rows: Tensor | Fp8Tensor,
    weight: QuantizedTensor,
    num_experts: int,
    order: Tensor,
    channels: int,
    variant: Variant,
) -> None:
    if variant.orders and (len(order) > MAX_ORDERED or variant.sorts):
        raise ValueError(f"{name}: {len(order)} pairs are not in order, {MAX_ORDERED} in short tiles can be")
    fits = (
        format_of(weight) is variant.weight_format
        and isinstance(rows, Fp8Tensor) == variant.is_fp8
        and (isinstance(rows, Fp8Tensor) or (rows.dtype == torch.bfloat16 and rows.is_contiguous()))
        and rows.shape[1] == weight.shape[1]
        and not rows.shape[1] % (DEPTH * variant.scale_stages)
        and not channels % DEPTH
        and num_experts <= MAX_EXPERTS
    )
    if not fits:
        raise ValueError(
            f"{name}: rows {list(rows.shape)} and {variant.weight_format.value} weights {list(weight.shape)} of"
            f" {num_experts} experts aren't contiguous, of such a format, in multiples of {DEPTH} channels and at most"
            f" {MAX_EXPERTS} experts"
        )


def _run(
    variant: Variant,
    rows: Tensor | Fp8Tensor,
    weight: QuantizedTensor,
    order: Tensor,
    firsts: Tensor,
    outputs: tuple[Tensor, Tensor | None],
    sizes: tuple[int, int, int, int, int],
) -> None:
    """`sizes` are those of the launch, without the number of CTAs."""
    operands = (rows.data.view(torch.uint8), rows.scales) if isinstance(rows, Fp8Tensor) else (rows, None)
    global_scale = weight.global_scale if isinstance(weight, Nvfp4Tensor) else None
    compiled(variant, has_global_scale=global_scale is not None)(
        *operands,
        weight.data.view(torch.uint8),
        weight.scales,
        global_scale,
        order,
        firsts,
        *outputs,
        *sizes,
        num_multiprocessors(order.device) * variant.num_ctas,
    )


@cache
def compiled(variant: Variant, *, has_global_scale: bool = False, options: str = "") -> Callable[..., Any]:
    """The launch of a variant, on the current CUDA device and from the cache unless `options` compile it anew."""
    if not options:
        arguments = f"{variant!r} {has_global_scale}"
        return load_or_compile("quantized_gemm", arguments, lambda: _compile(variant, has_global_scale))
    launch: Callable[..., Any] = _compile(variant, has_global_scale, options)
    return launch


def _compile(variant: Variant, has_global_scale: bool, options: str = "") -> Any:
    def matrix(dtype: Any, bytes_apart: int) -> Any:
        stride = cute.sym_int64(divisibility=bytes_apart * 8 // dtype.width)
        columns = cute.sym_int(divisibility=bytes_apart * 8 // dtype.width)
        return make_fake_tensor(dtype, (cute.sym_int(), columns), (stride, 1), assumed_align=bytes_apart)

    def vector(dtype: Any, alignment: int = 4) -> Any:
        return make_fake_compact_tensor(dtype, (cute.sym_int(),), assumed_align=alignment)

    v = variant
    return cute.compile(
        _Launch(v),
        matrix(Uint8 if v.is_fp8 else BFloat16, 16),
        matrix(Float32, 4) if v.is_fp8 else None,
        matrix(Uint8, 16),
        matrix(Float32, 4) if v.is_fp8 else vector(Uint8, 8),
        vector(Float32) if has_global_scale else None,
        vector(Int32),
        vector(Int32),
        matrix(Uint8 if v.quantizes else BFloat16, 16),
        matrix(Float32, 4) if v.quantizes else None,
        Int32(1),
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
        row_scales: Any,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        global_scale: Any,
        order: cute.Tensor,
        firsts: cute.Tensor,
        out: cute.Tensor,
        out_scales: Any,
        top_k: Int32,
        channels: Int32,  # of the output
        second_box: Int32,  # rows of weights from the first box to the second
        num_experts: Int32,
        starts_early: Int32,
        num_ctas: Int32,
        stream: driver.CUstream,
    ) -> None:
        v = self.variant
        kinds = warpgroup.SmemLayoutAtomKind
        w_atom = warpgroup.make_smem_layout_atom(kinds.K_SW64 if v.is_nvfp4 else kinds.K_SW128, Uint8)
        weights_layout = cute.tile_to_shape(w_atom, (v.box, v.weight_bytes, 2 * v.num_stages), order=(0, 1, 2))
        box_layout = cute.slice_(weights_layout, (None, None, 0))
        load_box = cpasync.CopyBulkTensorTileG2SOp()
        w_tma, w_coords = cpasync.make_tiled_tma_atom(load_box, weight, box_layout, (v.box, v.weight_bytes))
        num_row_bytes = v.num_stages * v.pieces * v.pairs * ROW_BYTES

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, v.num_stages]
            empty: cute.struct.MemRange[Int64, v.num_stages]
            tables: cute.struct.Align[cute.struct.MemRange[Int32, 4 * TABLE_LEN], 16]
            order: cute.struct.MemRange[Int16, MAX_ORDERED if v.orders else 2]
            scales: cute.struct.Align[cute.struct.MemRange[Uint8, v.num_slots * v.slot_bytes], 16]
            passing: cute.struct.Align[cute.struct.MemRange[Uint8, v.passing_bytes], 1024]
            rows: cute.struct.Align[cute.struct.MemRange[Uint8, num_row_bytes], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[Uint8, cute.cosize(weights_layout)], 1024]

        self.storage = Storage
        self._multiply(
            w_tma,
            w_coords,
            weights_layout,
            rows,
            row_scales,
            weight_scales,
            global_scale,
            order,
            firsts,
            out,
            out_scales,
            top_k,
            channels,
            second_box,
            num_experts,
            starts_early,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[v.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=v.num_ctas,
            preferred_smem_carveout=100,  # percent; without it several CTAs would ask for a device
            use_pdl=True,
        )

    @cute.kernel
    def _multiply(
        self,
        w_tma: cute.CopyAtom,
        w_coords: cute.Tensor,
        weights_layout: cute.ComposedLayout,
        rows: cute.Tensor,
        row_scales: Any,
        weight_scales: cute.Tensor,
        global_scale: Any,
        order: cute.Tensor,
        firsts: cute.Tensor,
        out: cute.Tensor,
        out_scales: Any,
        top_k: Int32,
        channels: Int32,
        second_box: Int32,
        num_experts: Int32,
        starts_early: Int32,
    ) -> None:
        v = self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        tables = make_tables(storage.tables.data_ptr())
        weights = storage.weights.get_tensor(weights_layout.outer, swizzle=weights_layout.inner)
        row_tiles, scale_tiles = storage.rows.data_ptr(), storage.scales.data_ptr()
        if warp == 0:
            cpasync.prefetch_descriptor(w_tma)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(v.num_stages):
                    cute.arch.mbarrier_init(full + stage, 1 + 128)  # weights, and the threads that load
                    cute.arch.mbarrier_init(empty + stage, 4 * v.num_groups)  # the warps that multiply
            cute.arch.mbarrier_init_fence()
        per_block = cutlass.const_expr(v.box if v.gate_up else 2 * v.box)
        channel_blocks = (channels + per_block - 1) // per_block
        if starts_early == 0:  # else nothing but rows is of the launch before: see dependent_launch
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(v.orders):
            ids, order = order, storage.order.get_tensor(cute.make_layout(MAX_ORDERED))
            scratch = cute.recast_ptr(storage.weights.data_ptr(), dtype=Int32)
            plan_pairs(ids, num_experts, order, scratch, tables, channel_blocks, v.pairs)
        else:
            plan_tiles(firsts, tables, channel_blocks, v.pairs, v.sorts)
        num_tiles = tables[0][MAX_EXPERTS]
        depth = cute.size(rows, mode=[1]) // DEPTH
        expert_rows = cute.size(w_coords, mode=[0]) // num_experts
        if warp < 4:
            if cutlass.const_expr(v.shares_anew):
                cute.arch.setmaxregister_decrease(v.registers[0])
            load(
                v,
                w_tma,
                w_coords,
                weights,
                row_tiles,
                scale_tiles,
                rows,
                row_scales,
                weight_scales,
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
        else:
            if cutlass.const_expr(v.shares_anew):
                cute.arch.setmaxregister_increase(v.registers[1])
            multiply(
                v,
                weights,
                row_tiles,
                scale_tiles,
                storage.passing.data_ptr(),
                global_scale,
                order,
                out,
                out_scales,
                tables,
                full,
                empty,
                channels,
                channel_blocks,
                num_tiles,
                depth,
            )
