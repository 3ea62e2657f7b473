"""All-reduce over peer memory with what follows it, in one kernel; the contract stands in kernels/all_reduce.py.

A program takes whole rows, or a part of one where rows are few. N ranks, T rows, D columns, V
vectors of 16 bytes in a row.
"""

from typing import Any

import triton
from torch import Tensor

from dist_infer.kernels.all_reduce import MAX_PARTS, Epilogue, PeerSpace, Reduced, empty_reduced
from dist_infer.kernels.carriers import ExpertOutputs, Fp8Scaling, Fp8Tensor, Nvfp4Tensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.triton.dependent_launch import may_read_early, overlapping
from dist_infer.kernels.triton.number_formats import num_zeroing_programs
from dist_infer.kernels.triton.one_shot import one_shot_kernel
from dist_infer.kernels.triton.quantize import kernel_format
from dist_infer.kernels.triton.rms_norm import tile_of
from dist_infer.kernels.triton.two_shot import two_shot_kernel

_AHEAD = 1  # rows that a program has sent before it reads the first, where it has several
_MAX_ASKED = 4096  # vectors that a program asks for before it waits for the first: they take registers
_MAX_TILE = 4
_NUM_SMS = 128  # roughly: what a tile is made for


def one_shot(x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace) -> Reduced:
    """See `dist_infer.kernels.all_reduce.one_shot`."""
    reduced = empty_reduced(x, epilogue)
    num_rows = x.shape[-2]
    if num_rows == 0:
        return reduced
    parts = _num_parts(num_rows, x.shape[-1], space.max_programs, epilogue.quant_format)
    arguments, constants, options = _common(x, epilogue, space, reduced, parts)
    layout = space.layout
    num_programs = parts * _even_programs(num_rows, space.max_programs) + constants["ZEROING"]
    num_programs = min(num_programs, space.max_programs)
    one_shot_kernel[num_programs, space.num_local](
        *arguments,
        layout.shares,
        layout.slots,
        layout.slot_bytes,
        layout.row_bytes,
        **constants,
        PARTS=parts,
        AHEAD=_AHEAD if num_rows > num_programs and isinstance(x, Tensor) else 0,
        **options,
    )
    return reduced


def two_shot(x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace) -> Reduced:
    """See `dist_infer.kernels.all_reduce.two_shot`."""
    reduced = empty_reduced(x, epilogue)
    num_rows = x.shape[-2]
    if num_rows == 0:
        return reduced
    arguments, constants, options = _common(x, epilogue, space, reduced)
    layout = space.layout
    # Flags are found by tile, so the rows of a tile depend on what all ranks know alike.
    share = triton.cdiv(num_rows, layout.num_ranks)
    rows = min(_MAX_TILE, triton.next_power_of_2(triton.cdiv(share, _NUM_SMS)))
    num_programs = min(num_rows + constants["ZEROING"], space.max_programs)
    two_shot_kernel[num_programs, space.num_local](
        *arguments,
        layout.max_tiles,
        layout.flags,
        layout.counters,
        layout.parts,
        layout.part_bytes,
        layout.sums,
        layout.row_bytes,
        **constants,
        ROWS=rows,
        **options,
    )
    return reduced


def _num_parts(num_rows: int, hidden: int, max_programs: int, quant_format: QuantFormat | None) -> int:
    """Programs that share a row: more of the device's multiprocessors work on few rows."""
    _, num_warps = tile_of(hidden)
    parts = 1 if quant_format is QuantFormat.FP8_ROWS else MAX_PARTS
    while parts > min(num_warps, max(1, max_programs // num_rows)):
        parts //= 2
    return parts


def _even_programs(num_rows: int, max_programs: int) -> int:
    """Programs that get equally many rows, or nearly."""
    return -(-num_rows // -(-num_rows // max_programs))


def _common(
    x: Tensor | ExpertOutputs, epilogue: Epilogue, space: PeerSpace, reduced: Reduced, parts: int = 1
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """The first arguments of both kernels, their constants, and how they are launched."""
    num_rows, hidden = x.shape[-2:]
    columns, num_warps = tile_of(hidden)
    rows = reduced.total
    per_vector = 16 // rows.element_size()
    data = scales = scale = None
    data_stride = scales_stride = zeroing = 0
    quant_format = None
    if reduced.quantized:
        first = reduced.quantized[0]
        quant_format, block, swizzled = kernel_format(first)
        data, data_stride = first.data, first.data.numel()
        if isinstance(first, Fp8Tensor) and first.scaling is Fp8Scaling.TENSOR:
            scale = first.scales
        else:
            scales, scales_stride = first.scales, first.scales.numel()
            scale = first.global_scale if isinstance(first, Nvfp4Tensor) else None
            zeroing = num_zeroing_programs(num_rows, hidden // block, swizzled=swizzled)
    memory_stride = 0 if space.memory.dim() == 1 else space.memory.stride(0)
    sources: tuple[Tensor | None, ...]
    sources = (x, None, None, None) if isinstance(x, Tensor) else (x.outputs, x.ids, x.weights, x.shared)
    arguments: list[Any] = [*sources, epilogue.residual, epilogue.weight, reduced.total, reduced.normed]
    arguments += [data, scales, scale, data_stride, scales_stride, space.memory, memory_stride]
    arguments += [space.table, space.rank, num_rows, int(may_read_early(rows)), epilogue.eps]
    num_ranks = space.layout.num_ranks
    block = columns // per_vector // parts
    constants = {
        "NUM_RANKS": num_ranks,
        "HIDDEN": hidden,
        "VECTORS": hidden // per_vector,
        "BLOCK": block,
        "TOP_K": 0 if isinstance(x, Tensor) else x.ids.shape[-1],
        "NUM_EXPERTS": 0 if isinstance(x, Tensor) else x.num_experts,
        "FORMAT": quant_format,
        "ZEROING": zeroing,
        "TOGETHER": max(1, _MAX_ASKED // block),
    }
    return arguments, constants, {"num_warps": num_warps // parts, **overlapping(rows, alone=not space.shares_device)}
