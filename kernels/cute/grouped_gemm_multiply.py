"""The warpgroups of a grouped product that multiply."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from dist_infer.kernels.cute.grouped_gemm_parts import DEPTH, PASS_BYTES, STEP, from_lane
from dist_infer.kernels.cute.grouped_gemm_write import write
from dist_infer.kernels.cute.moe_schedule import look_up_in_cluster, tile_of


@cute.jit
def multiply(
    v: cutlass.Constexpr,
    weights: cute.Tensor,
    row_tiles: cute.Tensor,
    passing: cute.Pointer,
    order: cute.Tensor,
    out: cute.Tensor,
    tables: tuple[cute.Tensor, ...],
    full: cute.Pointer,
    empty: cute.Pointer,
    channels: Int32,
    channel_blocks: Int32,
    num_tiles: Int32,
    depth: Int32,
) -> None:
    """The warpgroups that multiply: each has 64 rows of either box of weights, and all pairs."""
    thread_of_cta, _, _ = cute.arch.thread_idx()
    thread = thread_of_cta - 128
    group = cute.arch.make_warp_uniform(thread // 128)
    low = cute.make_rmem_tensor(cute.make_layout(v.pairs // 2), Float32)
    high = cute.make_rmem_tensor(cute.make_layout(v.pairs // 2), Float32)
    rows = cute.make_rmem_tensor(cute.make_layout(v.pairs // STEP), Int32)
    stage, phase = Int32(0), Int32(0)
    lane = cute.arch.lane_idx()
    known = look_up_in_cluster(tables, lane, num_tiles, channel_blocks, v.pairs, v.cluster)
    turn = Int32(0)
    while tile_of(turn) < num_tiles:
        if turn % 32 == 0 and turn > 0:
            known = look_up_in_cluster(tables, turn + lane, num_tiles, channel_blocks, v.pairs, v.cluster)
        _, block, first, count, longest, _ = from_lane(known, turn % 32)
        for step in cutlass.range_constexpr(v.pairs // STEP):  # read here, they are there when the sums are
            pair = step * STEP + thread % 128 // 8
            rows[step] = first + pair
            if cutlass.const_expr(not v.gate_up) and pair < count:
                rows[step] = Int32(order[first + pair])
        for which in cutlass.range_constexpr(len(v.sizes)):
            smaller = cutlass.const_expr(v.sizes[which - 1] if which else 0)
            if longest > smaller and longest <= v.sizes[which]:
                stage, phase = _sum(
                    v, v.sizes[which], low, high, weights, row_tiles, full, empty, stage, phase, depth, group
                )
        channel = block * v.box + group * 64
        if cutlass.const_expr(not v.gate_up):
            channel += block * v.box
        buffer = passing.toint() + group * (v.num_passes * PASS_BYTES)
        place = (count, channel, channels, thread % 128, group)
        if cutlass.const_expr(v.gate_up):
            write(v, low, high, buffer, rows, out, *place)
        else:
            write(v, low, None, buffer, rows, out, *place)
            write(v, high, None, buffer, rows, out, count, channel + v.box, *place[2:])
        turn += 1


@cute.jit
def _sum(
    v: cutlass.Constexpr,
    size: cutlass.Constexpr,
    low: cute.Tensor,
    high: cute.Tensor,
    weights: cute.Tensor,  # [row, channel, box of the stages]
    row_tiles: cute.Tensor,  # [pair, channel, stage]
    full: cute.Pointer,
    empty: cute.Pointer,
    stage: Int32,
    phase: Int32,
    depth: Int32,
    group: Int32,
):
    """low, high = products of `size` pairs with the rows of either box; (stage, phase) after them."""
    mma = _make_mma(v, size)
    mma_thread = mma.get_slice(group * 128)  # operands in shared memory are the warpgroup's
    tokens_layout = cute.append(
        cute.tile_to_shape(_k_atom(v.number), (size, DEPTH), order=(0, 1)).outer,
        cute.make_layout(v.pieces * v.num_stages, stride=v.pairs * DEPTH),
    )
    tokens = cute.make_tensor(row_tiles.iterator, tokens_layout)
    f_w = mma_thread.make_fragment_A(mma_thread.partition_A(weights))
    f_t = mma_thread.make_fragment_B(mma_thread.partition_B(tokens))
    sums_layout = cute.make_layout(mma_thread.partition_shape_C((v.box, size)))
    low_sums = cute.make_tensor(low.iterator, sums_layout)
    high_sums = cute.make_tensor(high.iterator, sums_layout)
    k = Int32(0)
    last = stage
    while k < depth:
        cute.arch.mbarrier_wait(full + stage, phase)
        if cutlass.const_expr(v.gate_up):
            cute.arch.fence_proxy("async.shared", space="cta")  # rows were not copied by TMA
        warpgroup.fence()
        for at in cutlass.range_constexpr(v.pieces * DEPTH // 16):
            piece, step = cutlass.const_expr(at // (DEPTH // 16)), cutlass.const_expr(at % (DEPTH // 16))
            if cutlass.const_expr(at == 0):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
            else:
                mma.set(warpgroup.Field.ACCUMULATE, True)
            f_step = f_t[(None, None, step, v.pieces * stage + piece)]
            box = 2 * v.pieces * stage + piece
            cute.gemm(mma, low_sums, f_w[(None, None, step, box)], f_step, low_sums)
            cute.gemm(mma, high_sums, f_w[(None, None, step, box + v.pieces)], f_step, high_sums)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if k > 0:
            _free(v, empty + last)
        last = stage
        stage += 1
        if stage == v.num_stages:
            stage = Int32(0)
            phase ^= 1
        k += 1
    warpgroup.wait_group(0)
    _free(v, empty + last)
    return stage, phase


@cute.jit
def _free(v: cutlass.Constexpr, barrier: cute.Pointer) -> None:
    """A warp has read a stage, and whoever writes to it knows."""
    with cute.arch.elect_one():
        if cutlass.const_expr(v.cluster == 1):
            cute.arch.mbarrier_arrive(barrier)
        else:
            for cta in cutlass.range_constexpr(v.cluster):
                cute.arch.mbarrier_arrive(barrier, cta)


def _k_atom(dtype):
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)


def _make_mma(v, size):
    """[rows of a box of weights, pairs] for all warpgroups that multiply."""
    op = warpgroup.MmaF16BF16Op(
        v.number, Float32, (64, size, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K, OperandMajorMode.K
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (v.num_groups, 1, 1))
