"""What the warps of a grouped product with quantised weights agree on: its variants and the sizes of its tiles."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute.grouped_gemm_parts import PASS, PASS_BYTES, SHORT, STEP
from dist_infer.kernels.scaled_linear import WeightFormat

DEPTH = 128  # channels summed over a stage
ROW_BYTES = 128  # of a swizzled row of pairs in shared memory
_LOADS, _FEWER_LOADS = 56, 40  # registers of a thread that loads, alone on a multiprocessor or not


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled apart: the gate and up product with its activation, or without one the down product.

    `sizes`: numbers of pairs that a tile is computed for, ascending multiples of 8, the last one of 16.
    `num_groups`: warpgroups that multiply, one or two; each has 64 rows of either box of weights.
    `num_ctas`: on a multiprocessor.
    `streams`: each weight is read once, so that caches needn't keep it.
    `scale_stages`: of MXFP8 and NVFP4, stages whose scales of a row come together; depth is whole numbers of them.
    `orders`: there is no order yet, but the ids of the pairs; tiles are short.
    """

    weight_format: WeightFormat
    activation: GatedActivation | None
    sizes: tuple[int, ...]
    num_stages: int
    num_groups: int
    num_ctas: int = 1
    streams: bool = False
    scale_stages: int = 1
    orders: bool = False

    @property
    def gate_up(self) -> bool:
        """The two boxes of weights of a stage are gates and ups, and rows are gathered."""
        return self.activation is not None

    @property
    def is_fp8(self) -> bool:
        """Rows are FP8 as the weights are; else they have 16 bits, and weights are dequantised."""
        return self.weight_format is WeightFormat.FP8_BLOCK

    @property
    def is_nvfp4(self) -> bool:
        """Weights have four bits."""
        return self.weight_format is WeightFormat.NVFP4

    @property
    def quantizes(self) -> bool:
        """A tile has whole blocks of the down product's inputs, which it quantises."""
        return self.is_fp8 and self.gate_up and self.num_groups == 2

    @property
    def number(self):
        """Of results that aren't quantised, as CuTe DSL names it."""
        return BFloat16

    @property
    def box(self) -> int:
        """Rows of weights that one load takes; a stage has two boxes."""
        return 64 * self.num_groups

    @property
    def pairs(self) -> int:
        """The most pairs of a tile."""
        return self.sizes[-1]

    @property
    def pieces(self) -> int:
        """Swizzled rows of a pair in a stage."""
        return 1 if self.is_fp8 else 2

    @property
    def weight_bytes(self) -> int:
        """Of a row of weights in a stage."""
        return DEPTH // 2 if self.is_nvfp4 else DEPTH

    @property
    def scale_bytes(self) -> int:
        """Of a row of weights in a stage, or with FP8 of a pair."""
        return 8 if self.is_nvfp4 else 4

    @property
    def slot_bytes(self) -> int:
        """Of scales that come together: with FP8 of all pairs, then of the boxes; else of the rows of weights."""
        if self.is_fp8:
            return (self.pairs + 4) * 4
        return 2 * self.box * self.scale_bytes * self.scale_stages

    @property
    def num_slots(self) -> int:
        """Slots of scales: all stages that aren't free have theirs."""
        return self.num_stages if self.scale_stages == 1 else self.num_stages // self.scale_stages + 1

    @property
    def scales_of_thread(self) -> int:
        """Pairs whose scales a thread that loads copies."""
        return -(-self.pairs // 128) if self.is_fp8 else 0

    @property
    def num_threads(self) -> int:
        """Of a CTA: one warpgroup loads."""
        return 128 * (1 + self.num_groups)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that loads, and of one that multiplies: what they were given in equal shares, shared anew."""
        given = 65536 // (self.num_ctas * self.num_threads) // 8 * 8
        loads = _LOADS if self.num_ctas == 1 else _FEWER_LOADS
        return loads, (given * (1 + self.num_groups) - loads) // self.num_groups // 8 * 8

    @property
    def shares_anew(self) -> bool:
        """An equal share of the registers would be too few for a thread that multiplies."""
        return self.num_groups == 2

    @property
    def is_scattered(self) -> bool:
        """Outputs are so few that each thread stores its own."""
        return not self.gate_up and self.pairs <= STEP

    @property
    def num_passes(self) -> int:
        """Buffers of a warpgroup for what is on its way out."""
        return min(2, -(-self.pairs // PASS))

    @property
    def passing_bytes(self) -> int:
        """Of the buffers of all warpgroups."""
        return self.num_groups * self.num_passes * PASS_BYTES

    @property
    def sorts(self) -> bool:
        """Tiles are of lengths so different that their order tells."""
        return self.pairs > SHORT


@cute.jit
def copy_bytes(target: Int32, source: Int64, size: cutlass.Constexpr) -> None:
    """4, 8 or 16 bytes from global to shared memory; `arrive_when_copied` waits for them too."""
    cache = cutlass.const_expr("cg" if size == 16 else "ca")  # past the first, where that is possible
    copy = cutlass.const_expr(f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size};")
    cute.arch.inline_ptx(copy, read_only_args=[target, source])


@cute.jit
def slot_after(v: cutlass.Constexpr, slot: Int32, k: Int32) -> Int32:
    """The slot of scales of the stage behind stage k of a tile."""
    if k % v.scale_stages == v.scale_stages - 1:
        slot += 1
    if slot == v.num_slots:
        slot = Int32(0)
    return slot


@cute.jit
def load_float(source: Int32) -> Float32:
    """From shared memory."""
    load = cutlass.const_expr("ld.shared.f32 {$w0}, [{$r0}];")
    return cute.arch.inline_ptx(load, write_only_types=[Float32], read_only_args=[source])


@cute.jit
def load_floats(source: Int32):
    """Two from shared memory."""
    load = cutlass.const_expr("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];")
    return cute.arch.inline_ptx(load, write_only_types=[Float32, Float32], read_only_args=[source])
