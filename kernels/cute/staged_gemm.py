"""The launch of a product with a staged weight, and its warp that loads.

Persistent CTAs. A stage of the weight is 64 rows for each of four warpgroups that multiply; one bulk copy brings it,
and TMA the inputs. The stages of all blocks of outputs and tokens make up one sequence, of which each CTA has an even
share and walks it backwards. So a block may be cut between CTAs, and of these the last one, which finds its part of it
at the end of its way, adds up what those in front have left (staged_sums): nobody waits for a CTA that may not run
yet.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from dist_infer.kernels.cute.staged_multiply import multiply
from dist_infer.kernels.cute.staged_sums import ROOM_BYTES, tell_of_part
from dist_infer.kernels.staged_weight import COLUMNS, ROWS, TILE_BYTES

PIECE = 64  # columns of the inputs that a TMA load takes: 128 bytes
_GROUPS = 4
_LOADER = 4 * _GROUPS  # its warp; the next one may say that a part is there
_SHARED_BYTES = 216 * 1024  # for stages
_MAX_STAGES = 8
_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];"
# What isn't read again leaves the last cache to inputs and parts of sums.
_COPY_ONCE = """{
.reg .b64 once;
createpolicy.fractional.L2::evict_first.b64 once, 1.0;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{$r0}], [{$r1}], {$r2}, [{$r3}], once;
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled apart. `tokens` of a block: a multiple of 8."""

    is_nvfp4: bool
    is_steep: bool
    tokens: int
    has_bias: bool

    @property
    def columns(self) -> int:
        """Of a stage."""
        return COLUMNS[self.is_nvfp4]

    @property
    def tile_bytes(self) -> int:
        """Of 64 rows by half the columns of a stage."""
        return TILE_BYTES[self.is_nvfp4]

    @property
    def weight_bytes(self) -> int:
        """Of a stage."""
        return 2 * _GROUPS * self.tile_bytes

    @property
    def input_bytes(self) -> int:
        """Of a stage."""
        return 2 * self.tokens * self.columns

    @property
    def num_stages(self) -> int:
        """As many as shared memory holds."""
        return min(_MAX_STAGES, _SHARED_BYTES // (self.weight_bytes + self.input_bytes))

    @property
    def num_early(self) -> int:
        """Stages whose weights are asked for before the first inputs, which would come after all of them."""
        return self.num_stages // 2 if 8 < self.tokens <= 64 else self.num_stages

    @property
    def has_teller(self) -> bool:
        """Whether a warp of its own says that parts are there, not each warp that multiplies."""
        # With an arrival for it ptxas has the products of large blocks wait for each other.
        return self.tokens <= 64

    @property
    def num_loading(self) -> int:
        """Threads: two warps, and of large blocks a warpgroup, which leaves its registers to the others."""
        return 64 if self.has_teller else 128


class Launch:
    """The launch of a variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        factor: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        parts: cute.Tensor,  # of CTAs, [numbers]
        flags: cute.Tensor,  # of their warps
        num_across: Int32,  # stages of a block
        num_ctas: Int32,
        is_early: Int32,  # the weight may be read before the launch in front has ended
        stream: driver.CUstream,
    ) -> None:
        v = self.variant
        k_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        x_layout = cute.tile_to_shape(k_atom, (v.tokens, PIECE, v.columns // PIECE * v.num_stages), order=(0, 1, 2))
        x_tma, x_coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, cute.slice_(x_layout, (None, None, 0)), (v.tokens, PIECE)
        )

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, v.num_stages]
            empty: cute.struct.MemRange[Int64, v.num_stages]
            left: cute.struct.MemRange[Int64, 1]
            inputs: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(x_layout)], 1024]
            room: cute.struct.Align[cute.struct.MemRange[Int32, _GROUPS * ROOM_BYTES // 4], 128]
            weights: cute.struct.Align[cute.struct.MemRange[Int32, v.weight_bytes // 4 * v.num_stages], 128]

        self.storage = Storage
        self._kernel(x_tma, x_coords, x_layout, weight, factor, bias, out, parts, flags, num_across, is_early).launch(
            grid=[num_ctas, 1, 1],
            block=[128 * _GROUPS + v.num_loading, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def _kernel(
        self,
        x_tma: cute.CopyAtom,
        x_coords: cute.Tensor,
        x_layout: cute.ComposedLayout,
        weight: cute.Tensor,
        factor: cute.Tensor,
        bias: cute.Tensor,
        out: cute.Tensor,
        parts: cute.Tensor,
        flags: cute.Tensor,
        num_across: Int32,
        is_early: Int32,
    ) -> None:
        v = self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        full, empty, left = storage.full.data_ptr(), storage.empty.data_ptr(), storage.left.data_ptr()
        inputs = storage.inputs.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        weights = storage.weights.data_ptr()
        if warp == _LOADER:
            cpasync.prefetch_descriptor(x_tma)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(v.num_stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, 4 * _GROUPS)
                cute.arch.mbarrier_init(left, 4 * _GROUPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        row_blocks = (cute.size(out, mode=[1]) + ROWS - 1) // ROWS
        token_blocks = (cute.size(out, mode=[0]) + v.tokens - 1) // v.tokens
        total = row_blocks * token_blocks * num_across
        begin, end = cta * total // num_ctas, (cta + 1) * total // num_ctas
        # What comes next waits for the end of all this, but its CTAs may be there when these leave
        cute.arch.griddepcontrol_launch_dependents()
        if warp >= _LOADER:
            if cutlass.const_expr(v.num_loading == 128):
                cute.arch.setmaxregister_decrease(24)
            if warp == _LOADER:
                _load(
                    v,
                    x_tma,
                    x_coords,
                    inputs,
                    weight,
                    weights,
                    full,
                    empty,
                    begin,
                    end,
                    num_across,
                    row_blocks,
                    is_early,
                )
            teller = cutlass.const_expr(_LOADER + 1 if v.has_teller else -1)
            if warp == teller and end % num_across != 0:
                tell_of_part(left, flags, cta)
        else:
            if cutlass.const_expr(v.num_loading == 128):
                cute.arch.setmaxregister_increase(112)
            multiply(
                v,
                inputs,
                weights,
                full,
                empty,
                left,
                factor,
                bias,
                out,
                parts,
                flags,
                begin,
                end,
                num_across,
                row_blocks,
                total,
                cta,
                num_ctas,
                storage.room.data_ptr().toint(),
            )


@cute.jit
def _load(
    v: cutlass.Constexpr,
    x_tma: cute.CopyAtom,
    x_coords: cute.Tensor,
    inputs: cute.Tensor,
    weight: cute.Tensor,
    weights: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    begin: Int32,
    end: Int32,
    num_across: Int32,
    row_blocks: Int32,
    is_early: Int32,
) -> None:
    """The warp that keeps shared memory full."""
    tiles = cute.local_tile(x_coords, (v.tokens, PIECE), (None, None))
    to, source = cpasync.tma_partition(
        x_tma, 0, cute.make_layout(1), cute.group_modes(inputs, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if is_early == 0:
        cute.arch.griddepcontrol_wait()
    row_stages = row_blocks * num_across
    ahead = cutlass.min(Int32(v.num_early), end - begin)
    idx = Int32(0)
    while idx < ahead:
        _load_weights(v, weight, weights, full, idx, (end - 1 - idx) % row_stages)
        idx += 1
    cute.arch.griddepcontrol_wait()
    stage, phase = Int32(0), Int32(1)  # the phase before the first counts as done
    pieces = cutlass.const_expr(v.columns // PIECE)
    at = end
    while at > begin:
        at -= 1
        if end - at > v.num_early:
            cute.arch.mbarrier_wait(empty + stage, phase)
            _load_weights(v, weight, weights, full, stage, at % row_stages)
        for piece in cutlass.range_constexpr(pieces):
            chosen = source[None, at // row_stages, at % num_across * pieces + piece]
            cute.copy(x_tma, chosen, to[None, stage * pieces + piece], tma_bar_ptr=full + stage)
        stage += 1
        if stage == v.num_stages:
            stage = Int32(0)
            phase ^= 1


@cute.jit
def _load_weights(
    v: cutlass.Constexpr, weight: cute.Tensor, weights: cute.Pointer, full: cute.Pointer, stage: Int32, idx: Int32
) -> None:
    """Stage number `idx` of the weight."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, v.weight_bytes + v.input_bytes)
        cute.arch.inline_ptx(
            _COPY_ONCE if v.tokens <= 64 else _COPY,
            read_only_args=[
                weights.toint() + stage * v.weight_bytes,
                weight.iterator.toint() + Int64(idx) * v.weight_bytes,
                Int32(v.weight_bytes),
                (full + stage).toint(),
            ],
        )
