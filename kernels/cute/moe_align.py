"""Many pairs of a row and an expert in the order of their experts, in CuTe DSL for sm_90a.

CTAs count the pairs of a chunk by expert; with the counts of all chunks a second launch puts them in place. Few pairs
don't need it: see moe_order. P pairs, E experts.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings import driver
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from torch import Tensor

from dist_infer.kernels.cute.compile_cache import load_or_compile
from dist_infer.kernels.cute.moe_order import SCRATCH_LEN, WARPS, rank_pairs, sum_of_warps
from dist_infer.kernels.cute.moe_schedule import MAX_EXPERTS, sum_up_to

_TURNS = 4
_CHUNK = WARPS * 32 * _TURNS  # pairs


def align(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order, firsts): pairs r K + k expert by expert, each's in ascending order, and where each expert's begin.

    What is no expert held has no place. Up to MAX_EXPERTS experts.

    Shapes: contiguous expert_ids [R, K] int32 -> [P] int32, [E + 1] int32.
    Stream: the current one; the host waits for nothing, and a CUDA graph may hold it.
    """
    num_pairs = expert_ids.numel()
    num_chunks = -(-num_pairs // _CHUNK)
    order, firsts, counts = (
        torch.empty(size, dtype=torch.int32, device=expert_ids.device)
        for size in (num_pairs, num_experts + 1, num_chunks * MAX_EXPERTS)
    )
    compiled()(expert_ids.view(-1), counts, order, firsts, num_chunks)
    return order, firsts


@cache
def compiled(options: str = "") -> Callable[..., Any]:
    """Both launches, on the current CUDA device and from the cache unless `options` compile them anew."""
    if not options:
        return load_or_compile("moe_align", "", _compile)
    launch: Callable[..., Any] = _compile(options)
    return launch


def _compile(options: str = "") -> Any:
    def table() -> Any:
        return make_fake_compact_tensor(Int32, (cute.sym_int(),), assumed_align=4)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        _align, table(), table(), table(), table(), Int32(1), stream, options=f"--enable-tvm-ffi {options}"
    )


@cute.jit
def _align(
    ids: cute.Tensor,
    counts: cute.Tensor,  # [chunk, MAX_EXPERTS], flat
    order: cute.Tensor,
    firsts: cute.Tensor,
    num_chunks: Int32,
    stream: driver.CUstream,
) -> None:
    shape = {"grid": [num_chunks, 1, 1], "block": [MAX_EXPERTS, 1, 1], "stream": stream, "use_pdl": True}
    _count(ids, counts, firsts.shape[0] - 1).launch(**shape)
    _place(ids, counts, order, firsts).launch(**shape)


@cute.struct
class _Storage:
    before: cute.struct.MemRange[Int32, SCRATCH_LEN]
    table: cute.struct.MemRange[Int32, MAX_EXPERTS + WARPS]


@cute.kernel
def _count(ids: cute.Tensor, counts: cute.Tensor, num_experts: Int32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    chunk, _, _ = cute.arch.block_idx()
    storage = cutlass.memory.SmemAllocator().allocate(_Storage)
    before = storage.before.get_tensor(cute.make_layout(SCRATCH_LEN))
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    rank_pairs(ids, chunk * _CHUNK, num_experts, before, _TURNS)
    counts[chunk * MAX_EXPERTS + thread] = sum_of_warps(before)


@cute.kernel
def _place(ids: cute.Tensor, counts: cute.Tensor, order: cute.Tensor, firsts: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    chunk, _, _ = cute.arch.block_idx()
    num_chunks, _, _ = cute.arch.grid_dim()
    warp, lane = cute.arch.make_warp_uniform(thread // 32), cute.arch.lane_idx()
    num_experts = firsts.shape[0] - 1
    storage = cutlass.memory.SmemAllocator().allocate(_Storage)
    before = storage.before.get_tensor(cute.make_layout(SCRATCH_LEN))
    table = storage.table.get_tensor(cute.make_layout(MAX_EXPERTS + WARPS))
    # Ids were there when the launch before began, which has waited for them.
    own, rank = rank_pairs(ids, chunk * _CHUNK, num_experts, before, _TURNS)
    sum_of_warps(before)
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    earlier, total = Int32(0), Int32(0)
    for other in cutlass.range(num_chunks, unroll=8):
        count = counts[other * MAX_EXPERTS + thread]
        total += count
        if other < chunk:
            earlier += count
    upto = sum_up_to(total, table)
    table[thread] = upto - total + earlier
    if chunk == 0:
        if thread < num_experts:
            firsts[thread + 1] = upto
        if thread == 0:
            firsts[0] = Int32(0)
    cute.arch.sync_threads()
    for turn in cutlass.range_constexpr(_TURNS):
        if own[turn] >= 0:
            place = table[own[turn]] + before[warp * MAX_EXPERTS + own[turn]] + rank[turn]
            order[place] = chunk * _CHUNK + (warp * _TURNS + turn) * 32 + lane
